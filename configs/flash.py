"""FLASH: gated attention units in groups, with linear attention across them.

    python train.py --config configs/flash.py:tiny
    python train.py --config configs/flash.py

A group has model.attention.chunk_size tokens, 64 by default. The paper uses 256.

Expected: a held-out loss of 1.921 nats/byte after 300 steps of `:tiny`. A table of
trigrams reaches 1.848.

Measured with --config.steps=300 --config.evaluate.every=0
--config.data.documents=joined on two CPU cores, on all held-out text of the standard
library of Python 3.11. The 3000 steps of `:tiny` and the larger sizes were not
measured.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.mechanism = "flash"
    # A unit replaces both attention and feed-forward, and has half of their weights.
    config.model.depth *= 2
    config.model.update(feedforward=0, activation="relu")  # a unit has no feed-forward
    return config
