"""Pallas kernels for TPUs, and the adapters that call them."""
