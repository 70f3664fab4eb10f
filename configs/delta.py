"""DeltaNet: linear attention that erases a key's old value before it writes a new one.

    python train.py --config configs/delta.py:tiny
    python train.py --config configs/delta.py

Queries, keys and values pass through a convolution over 4 tokens (arXiv:2406.06484).

Expected: a held-out loss of 1.870 nats/byte after 300 steps of `:tiny`. Softmax reaches
2.019, and a table of trigrams 1.848.

Measured with --config.steps=300 --config.evaluate.every=0
--config.data.documents=joined on two CPU cores, on all held-out text of the standard
library of Python 3.11. The 3000 steps of `:tiny` and the larger sizes were not
measured.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.with_remat(size, "feedforward")
    config.model.attention.update(
        mechanism="delta", decay="none", short_convolution=4, output_gate="silu"
    )
    return config
