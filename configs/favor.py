"""Performer with the features of FAVOR++.

python train.py --config configs/favor.py:tiny
python train.py --config configs/favor.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.update(
        mechanism="performer", features="favor++", query_key_norm=True
    )
    config.model.attention.feature_count = 64  # for heads of 32
    return config
