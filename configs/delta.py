"""DeltaNet: a linear state that erases what it holds at a key before it writes.

    python train.py --config configs/delta.py:tiny
    python train.py --config configs/delta.py

Queries, keys and values pass a convolution of 4 tokens (arXiv:2406.06484).
Not measured yet.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.update(
        mechanism="delta", decay="none", short_convolution=4, output_gate=True
    )
    return config
