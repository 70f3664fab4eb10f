"""Kernels for accelerators, each with the pure function that it must equal."""

from symjax.attention.kernels.fused import RESIDUALS, fused

__all__ = ["RESIDUALS", "fused"]
