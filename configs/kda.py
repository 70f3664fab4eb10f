"""Kimi Delta Attention: the delta rule with a learned decay of every channel.

    python train.py --config configs/kda.py:tiny
    python train.py --config configs/kda.py

Queries, keys and values pass a convolution of 4 tokens (arXiv:2510.26692).
Not measured yet.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.update(
        mechanism="delta", decay="kda", short_convolution=4, output_gate=True
    )
    return config
