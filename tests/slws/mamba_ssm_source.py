"""mamba-ssm's MixerModel on a CPU: the Python source of its sdist, what is compiled or Triton left out.

The sdist is fetched from the package index once, into the user's cache. Importing this module raises ConnectionError
where neither has it.
"""

import importlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

from torch import nn

VERSION = "2.2.6.post3"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "slws-vim" / "mixer"


def fetch() -> Path:
    """The folder with the package `mamba_ssm` in it."""
    archive, folder = CACHE / f"mamba_ssm-{VERSION}.tar.gz", CACHE / f"mamba_ssm-{VERSION}"
    if not archive.exists():
        command = [sys.executable, "-m", "pip", "download", f"mamba-ssm=={VERSION}", "--dest", str(CACHE), "--quiet"]
        # Its build step imports torch: without isolation it finds the one that is here.
        command += ["--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if not archive.exists():
            raise ConnectionError(f"mamba-ssm {VERSION} could not be fetched: {done.stderr.strip()[-300:]}")
    if not folder.exists():
        with tarfile.open(archive) as tar:
            members = [m for m in tar.getmembers() if m.name.endswith(".py") and m.name.count("/") > 1]
            tar.extractall(CACHE, members, filter="data")
    return folder


def _stub(name: str, **contents) -> ModuleType:
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(contents)
    return module


_stub("mamba_ssm").__path__ = [str(fetch() / "mamba_ssm")]
_stub("selective_scan_cuda")
_stub("mamba_ssm.modules.mamba2", Mamba2=None)
_stub("mamba_ssm.utils.generation", GenerationMixin=object, InferenceParams=object)
_stub("mamba_ssm.utils.hf", load_config_hf=None, load_state_dict_hf=None)
_layer_norm = dict.fromkeys(("layer_norm_fn", "rms_norm_fn", "_layer_norm_fwd"))
_stub("mamba_ssm.ops.triton.layer_norm", RMSNorm=nn.RMSNorm, **_layer_norm)
_scan = importlib.import_module("mamba_ssm.ops.selective_scan_interface")
_simple = importlib.import_module("mamba_ssm.modules.mamba_simple")
_simple.selective_scan_fn = _scan.selective_scan_ref
_simple.selective_state_update = None
MixerModel = importlib.import_module("mamba_ssm.models.mixer_seq_simple").MixerModel
# Nobody else shall take this for an installed mamba-ssm.
for _name in [name for name in sys.modules if name.partition(".")[0] in ("mamba_ssm", "selective_scan_cuda")]:
    del sys.modules[_name]
