"""ASEntmax: entmax-1.5 whose temperature follows the number of keys.

    python train.py --config configs/asentmax.py:tiny
    python train.py --config configs/asentmax.py

Expected: a held-out loss of 2.198 nats/byte after 300 steps of `:tiny`. Entmax
reaches 2.123, and softmax 2.019.

Measured with --config.steps=300 --config.evaluate.every=0
--config.data.documents=joined on two CPU cores, on all held-out text of the standard
library of Python 3.11. The 3000 steps of `:tiny` and the larger sizes were not
measured.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.update(mechanism="entmax15", length_scale="adaptive")
    return config
