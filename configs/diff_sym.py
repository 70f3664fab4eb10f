"""Differential and symmetric language model.

python train.py --config configs/diff_sym.py
python train.py --config configs/diff_sym.py:tiny
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.update(symmetric="plain", differential="v1")
    return config
