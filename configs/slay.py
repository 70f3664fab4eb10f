"""Performer with the features of SLAY, for a kernel of angles in place of softmax.

    python train.py --config configs/slay.py:tiny
    python train.py --config configs/slay.py

Its loss was not measured.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.update(mechanism="performer", features="slay")
    if size not in base.LARGE:  # heads of 32; heads of 128 take the default, 256
        config.model.attention.feature_count = 64
    return config
