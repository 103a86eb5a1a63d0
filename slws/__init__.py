"""SLWS, the Stochastic Layer-Wise Shuffle regulariser (Huang et al., ICML 2025, arXiv 2408.17081).

In training, layer l shuffles its tokens with probability rate * l / (depth - 1) and restores their order at its
output; at inference nothing happens.
"""

from .attach import Handle, attach_slws, describe
from .schedule import linear_rates
from .shuffle import SLWS, permute

__all__ = ["SLWS", "Handle", "attach_slws", "describe", "linear_rates", "permute"]
