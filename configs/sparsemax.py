"""Sparsemax attention: weights of exactly zero.

python train.py --config configs/sparsemax.py:tiny
python train.py --config configs/sparsemax.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.mechanism = "sparsemax"
    return config
