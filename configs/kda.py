"""Kimi Delta Attention: the delta rule with a learned decay of every channel.

    python train.py --config configs/kda.py:tiny
    python train.py --config configs/kda.py

Queries, keys and values pass a convolution of 4 tokens (arXiv:2510.26692). The output
gate is silu of one projection; the paper has sigmoid of one of low rank.

Measured on two CPU cores, standard library of Python 3.11, all of the held-out text:
`:tiny` 1.772 nats/byte after 300 steps (--config.steps=300 --config.evaluate.every=0;
softmax: 2.019). Its 3000 steps and the larger sizes were not measured. The trigram
line is 1.848.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.update(
        mechanism="delta", decay="kda", short_convolution=4, output_gate=True
    )
    return config
