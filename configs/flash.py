"""FLASH: gated attention units in groups, with linear attention across them.

    python train.py --config configs/flash.py:tiny
    python train.py --config configs/flash.py

Groups are chunks of model.attention.chunk_size tokens, 64; the paper's have 256.

Measured on two CPU cores, standard library of Python 3.11, all of the held-out text:
`:tiny` 1.921 nats/byte after 300 steps (--config.steps=300 --config.evaluate.every=0).
Its 3000 steps and the larger sizes were not measured yet. The trigram line is 1.848.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.mechanism = "flash"
    # A unit replaces attention and feed-forward with half of their weights.
    config.model.depth *= 2
    config.model.update(feedforward=0, activation="relu")  # it has no other layer
    return config
