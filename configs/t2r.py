"""Linear attention with learned features relu(Wx + b) (T2R).

python train.py --config configs/t2r.py:tiny
python train.py --config configs/t2r.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.update(mechanism="linear", features="t2r", feature_count=64)
    return config
