"""Measurements of a model, one file a measurement."""
