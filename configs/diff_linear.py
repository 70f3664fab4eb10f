"""Differential linear attention: two states, one subtracted from the other.

python train.py --config configs/diff_linear.py:tiny
python train.py --config configs/diff_linear.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.update(mechanism="linear", differential="v1")
    return config
