"""DeltaNet: a linear state that erases what it holds at a key before it writes.

    python train.py --config configs/delta.py:tiny
    python train.py --config configs/delta.py

Queries, keys and values pass a convolution of 4 tokens (arXiv:2406.06484).

Measured on two CPU cores, standard library of Python 3.11, all of the held-out text:
`:tiny` 1.870 nats/byte after 300 steps (--config.steps=300 --config.evaluate.every=0;
softmax: 2.019). Its 3000 steps and the larger sizes were not measured. The trigram
line is 1.848.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.with_remat(size, "feedforward")
    config.model.attention.update(
        mechanism="delta", decay="none", short_convolution=4, output_gate=True
    )
    return config
