"""Retention: linear attention whose state decays by a fixed rate a head (RetNet).

python train.py --config configs/retnet.py:tiny
python train.py --config configs/retnet.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.update(mechanism="decay", output_gate=True)
    return config
