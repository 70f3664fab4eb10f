"""Kernels for accelerators, each with the pure function that it must equal."""
