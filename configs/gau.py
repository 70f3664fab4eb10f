"""Gated attention units: squared-ReLU attention with one head.

python train.py --config configs/gau.py:tiny
python train.py --config configs/gau.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.mechanism = "gau"
    # A unit replaces attention and feed-forward with half of their weights.
    config.model.depth *= 2
    return config
