"""Pairwise symmetric attention: keys are U·query, with a free matrix U a head.

python train.py --config configs/pairwise.py:tiny
python train.py --config configs/pairwise.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.symmetric = "pairwise"
    return config
