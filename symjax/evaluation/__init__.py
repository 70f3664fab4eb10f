"""Evaluation of checkpoints: losses, samples, and measurements of the attention."""
