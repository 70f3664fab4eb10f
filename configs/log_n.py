"""Softmax with entropy-invariant scaling: scores times log n / log 512.

python train.py --config configs/log_n.py:tiny
python train.py --config configs/log_n.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.length_base = 512
    return config
