"""Weights that a mechanism adds to its attention layer."""
