"""Gated DeltaNet-2: Kimi Delta Attention with gates to erase and gates to write.

    python train.py --config configs/gdn2.py:tiny
    python train.py --config configs/gdn2.py

Each channel of a key has an erase gate and each channel of a value a write gate, in the
place of one β per head (arXiv:2605.22791). Queries, keys and values pass through a
convolution over 4 tokens. The output gate is silu of a full projection;
flash-linear-attention has the sigmoid of a low-rank projection.

Expected: a held-out loss of 1.749 nats/byte after 300 steps of `:tiny`.

Measured with --config.steps=300 --config.evaluate.every=0
--config.data.documents=joined on two CPU cores, on all held-out text of the standard
library of Python 3.11. The 3000 steps of `:tiny` and the larger sizes were not
measured.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.update(
        mechanism="delta",
        decay="kda",
        delta_gates="channel",
        short_convolution=4,
        output_gate="silu",
    )
    return config
