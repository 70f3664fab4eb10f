"""Grouped differential attention: four signal maps share one noise map.

    python train.py --config configs/grouped_diff.py:tiny
    python train.py --config configs/grouped_diff.py

Heads that are no multiple of four, as those of `:125m`, are groups of three.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.differential(size)
    heads = config.model.heads
    config.model.attention.signals = 3 if heads % 4 else 4
    return config
