"""Performer language model: softmax estimated by positive random features.

python train.py --config configs/performer.py
python train.py --config configs/performer.py:tiny
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.update(mechanism="performer", query_key_norm=True)
    if size == "tiny":
        config.model.attention.feature_count = 64  # for heads of 32
    return config
