"""Vision Mamba models, their weights and their training. Importing registers the model families with timm."""

from . import zoo as _zoo
from .convert import convert_state_dict, load_weights
from .models import VisionMamba

__all__ = ["VisionMamba", "convert_state_dict", "load_weights"]
__version__ = "0.1.0"
del _zoo
