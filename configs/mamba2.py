"""Mamba-2: linear attention with a learned decay per head and token.

    python train.py --config configs/mamba2.py:tiny
    python train.py --config configs/mamba2.py

Queries, keys and values pass through a convolution over 4 tokens. Its loss was not
measured.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.with_remat(size, "feedforward")
    config.model.attention.update(
        mechanism="decay", decay="mamba2", short_convolution=4, output_gate="silu"
    )
    return config
