"""Linear attention with the features elu + 1.

python train.py --config configs/linear.py:tiny
python train.py --config configs/linear.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.mechanism = "linear"
    return config
