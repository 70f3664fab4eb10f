"""Kernels for accelerators, each with the pure function that it must equal."""

from symjax.attention.kernels.blocks import RESIDUAL
from symjax.attention.kernels.fused import fused

__all__ = ["RESIDUAL", "fused"]
