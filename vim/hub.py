"""Files of the Hugging Face hub, named as hf_hub:OWNER/REPO[@REVISION]/FILE wherever a file of weights is asked for."""

from __future__ import annotations

import re
from pathlib import Path

from .runtime import UserError, first_line

PREFIXES = ("hf_hub:", "hf-hub:")  # timm takes both
_SPEC = re.compile(r"hf[_-]hub:([\w.-]+/[\w.-]+)(?:@([^@/\s]+))?/([^@/\s](?:[^@]*[^@/\s])?)")


def local(source: str | Path) -> str | Path:
    """The path of a file: `source` itself, or where the hub's client keeps the file that `source` names on the hub.

    FILE may lie in folders of the repository; REVISION is a branch, a tag or a commit, "main" where none is named.
    Raises UserError for a malformed name and where the file cannot be had.
    """
    if not (isinstance(source, str) and source.startswith(PREFIXES)):
        return source
    if not (found := _SPEC.fullmatch(source)):
        raise UserError(f"{source}: is not of the form hf_hub:OWNER/REPO/FILE or hf_hub:OWNER/REPO@REVISION/FILE")
    repository, revision, file = found.groups()
    return download(repository, file, revision)


def download(repository: str, file: str, revision: str | None = None, cache_dir: str | Path | None = None) -> str:
    """The path of a file of the hub, from its client's cache or fetched into it; HF_HUB_OFFLINE is honoured.

    Raises UserError, which names the repository, the revision and the file, where the client is not installed, the
    file is neither in the cache nor within reach, or the hub has no such repository, revision or file.
    """
    where = f"{repository}@{revision}" if revision else repository
    try:
        from huggingface_hub import errors, hf_hub_download
    except ImportError as error:
        raise UserError(f"{where}: {file} is on the hub, which needs: pip install 'slws-vim[hf]'") from error
    try:
        return hf_hub_download(repository, file, revision=revision, cache_dir=cache_dir)
    except errors.LocalEntryNotFoundError as error:
        why = f"it is not in the local cache, and the hub cannot be reached: {first_line(error.__cause__ or error)}"
        raise UserError(f"{where}: {file} cannot be downloaded ({why})") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"{where}: the hub has no such repository, or it is not public") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{where}: the repository has no such revision") from error
    except errors.EntryNotFoundError as error:
        raise UserError(f"{where}: the repository has no file {file}") from error
    except Exception as error:  # the client has many kinds, and those of its HTTP library
        raise UserError(f"{where}: {file} cannot be downloaded ({first_line(error)})") from error
