"""Weights from and for models of Hugging Face and of unilm."""
