"""Scale-invariant attention: scores are changed by the distance of a pair.

    python train.py --config configs/scale_invariant.py:tiny
    python train.py --config configs/scale_invariant.py

The paper (arXiv:2505.17083) leaves out the low frequencies of RoPE, which this file
keeps.

Expected: a held-out loss of 1.991 nats/byte after 300 steps of `:tiny`. Softmax reaches
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
    config.model.attention.length_scale = "distance"
    return config
