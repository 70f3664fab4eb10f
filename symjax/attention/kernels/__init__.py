"""Kernels for TPUs and NVIDIA GPUs, and the dispatch of calls to them."""
