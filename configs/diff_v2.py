"""Differential attention V2: λ of every token and head, no norm of the heads.

python train.py --config configs/diff_v2.py:tiny
python train.py --config configs/diff_v2.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.differential = "v2"
    return config
