"""A mixed stack: Performer below, softmax above, repeated over depth.

python train.py --config configs/mixed.py:tiny
python train.py --config configs/mixed.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.pattern = ("performer", "softmax")
    config.model.attention.query_key_norm = True
    config.model.attention.feature_count = 64  # for heads of 32
    return config
