"""Linear attention with the features of the Taylor polynomial 1 + s + s²/2 (Based).

    python train.py --config configs/taylor.py:tiny
    python train.py --config configs/taylor.py

Expected: a held-out loss of 2.247 nats/byte after 300 steps of `:tiny`. Softmax reaches
2.019, and a table of trigrams 1.848.

Measured with --config.steps=300 --config.evaluate.every=0
--config.data.documents=joined on two CPU cores, on all held-out text of the standard
library of Python 3.11. The 3000 steps of `:tiny` and the larger sizes were not
measured.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.update(mechanism="linear", features="taylor")
    config.model.attention.query_key_norm = True
    # The number of features grows with the square of the head size: 153 for size 16.
    if size in base.LARGE:
        config.model.heads = config.model.width // 16
    return config
