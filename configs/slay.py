"""Performer with the features of SLAY, for a kernel of angles in place of softmax.

    python train.py --config configs/slay.py:tiny
    python train.py --config configs/slay.py

Expected: a held-out loss of 2.391 nats/byte after 300 steps of `:tiny`.

Measured with --config.steps=300 --config.evaluate.every=0
--config.data.documents=joined on two CPU cores, on all held-out text of the standard
library of Python 3.11. The 3000 steps of `:tiny` and the larger sizes were not
measured.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.update(mechanism="performer", features="slay")
    if size not in base.LARGE:  # heads of 32; heads of 128 take the default, 256
        config.model.attention.feature_count = 64
    return config
