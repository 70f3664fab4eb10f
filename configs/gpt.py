"""Softmax language model: the measure of the others.

python train.py --config configs/gpt.py
python train.py --config configs/gpt.py:tiny
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    return config
