"""Gated DeltaNet: the delta rule with a learned decay of every head and token.

    python train.py --config configs/gated_delta.py:tiny
    python train.py --config configs/gated_delta.py

Queries, keys and values pass a convolution of 4 tokens (arXiv:2412.06464).
Not measured yet.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.update(
        mechanism="delta", decay="mamba2", short_convolution=4, output_gate=True
    )
    return config
