"""Symmetric language model: every key is its query.

python train.py --config configs/sym.py
python train.py --config configs/sym.py:tiny
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.symmetric = "plain"
    return config
