"""Kernels for NVIDIA GPUs, and the adapters that call them."""
