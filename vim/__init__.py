"""Vision Mamba models, their weights and their training. Importing registers the model families with timm."""

from . import zoo as _zoo
from .models import VisionMamba

__all__ = ["VisionMamba", "convert_state_dict", "load_weights"]
__version__ = "0.1.0"
del _zoo


def __getattr__(name: str):
    """vim.convert's functions when they are first asked for: `python -m vim.convert` finds its module not yet there."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import convert

    return getattr(convert, name)
