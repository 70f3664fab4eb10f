"""Differential and symmetric language model: two branches, each with key = query.

    python train.py --config configs/diff_sym.py:tiny
    python train.py --config configs/diff_sym.py

Expected: a held-out loss of 1.431 nats/byte after the 3000 steps of `:tiny`, and of
1.516 after 1500 steps of `:3l` with --config.batch_size=8 (3.6 million tokens). A
table of trigrams reaches 1.848.

Measured with --config.data.documents=joined on two CPU cores, on all held-out text of
the standard library of Python 3.11.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.differential(size)
    config.model.attention.symmetric = "plain"
    return config
