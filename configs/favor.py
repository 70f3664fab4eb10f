"""Performer with the features of FAVOR#.

    python train.py --config configs/favor.py:tiny
    python train.py --config configs/favor.py

Measured on two CPU cores, standard library of Python 3.11, all of the held-out text:
`:tiny` 2.328 nats/byte after 300 steps (--config.steps=300 --config.evaluate.every=0;
the same with --config.model.attention.features=favor++, since the statistics of new
models are equal in all directions; softmax: 2.019). Its 3000 steps and the larger sizes
were not measured. The trigram line is 1.848.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.update(
        mechanism="performer", features="favor#", query_key_norm=True
    )
    if size not in base.LARGE:  # their heads of 128 take the default, 256
        config.model.attention.feature_count = 64  # for heads of 32
    return config
