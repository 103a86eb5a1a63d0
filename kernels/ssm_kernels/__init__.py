"""Kernels of Vision Mamba models: one function per op, the fastest backend that runs, plain PyTorch underneath."""

from .backend import OPS, Unavailable, available_backends, use_backend
from .conv1d import causal_conv1d, conv_over
from .norm import add_norm
from .permute import inverse, permute_rows
from .scan import scan_again, scan_keeping, scan_over, selective_scan

__all__ = [
    "OPS",
    "Unavailable",
    "add_norm",
    "available_backends",
    "causal_conv1d",
    "conv_over",
    "inverse",
    "permute_rows",
    "scan_again",
    "scan_keeping",
    "scan_over",
    "selective_scan",
    "use_backend",
]
