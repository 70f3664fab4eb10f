"""Entmax-1.5 attention: between softmax and sparsemax.

python train.py --config configs/entmax.py:tiny
python train.py --config configs/entmax.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.mechanism = "entmax15"
    return config
