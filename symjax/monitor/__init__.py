"""Metrics, progress and traces of a run."""
