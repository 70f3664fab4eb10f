"""Differential language model, V1.

python train.py --config configs/diff.py
python train.py --config configs/diff.py:tiny
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.differential = "v1"
    return config
