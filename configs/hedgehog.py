"""Linear attention with learned features softmax([Wx, −Wx]) (Hedgehog).

python train.py --config configs/hedgehog.py:tiny
python train.py --config configs/hedgehog.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.update(mechanism="linear", features="hedgehog")
    return config
