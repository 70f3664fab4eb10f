"""Gated attention units: squared-ReLU attention with one head.

    python train.py --config configs/gau.py:tiny
    python train.py --config configs/gau.py

Measured on two CPU cores, standard library of Python 3.11, all of the held-out text:
`:tiny` 1.918 nats/byte after 300 steps (--config.steps=300 --config.evaluate.every=0).
Its 3000 steps and the larger sizes were not measured yet. The trigram line is 1.848.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.mechanism = "gau"
    # A unit replaces attention and feed-forward with half of their weights.
    config.model.depth *= 2
    config.model.update(feedforward=0, activation="relu")  # it has no other layer
    return config
