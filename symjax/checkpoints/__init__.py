"""Checkpoints on disk: saved in the background, checked when they are restored."""
