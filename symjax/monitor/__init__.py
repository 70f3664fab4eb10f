"""Metrics, progress and profiles of a run."""
