"""Linear attention with the features of 1 + s + s²/2 (Based).

python train.py --config configs/taylor.py:tiny
python train.py --config configs/taylor.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.update(mechanism="linear", features="taylor")
    config.model.attention.query_key_norm = True
    return config
