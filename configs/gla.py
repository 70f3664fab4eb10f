"""Gated linear attention: a learned decay of every channel and token.

python train.py --config configs/gla.py:tiny
python train.py --config configs/gla.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.update(mechanism="decay", decay="gated", output_gate=True)
    return config
