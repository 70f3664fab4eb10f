"""FLASH: gated attention units in groups, with linear attention across them.

python train.py --config configs/flash.py:tiny
python train.py --config configs/flash.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.mechanism = "flash"
    # A unit replaces attention and feed-forward with half of their weights.
    config.model.depth *= 2
    return config
