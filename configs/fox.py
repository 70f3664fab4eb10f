"""Softmax with forget gates (FoX): log-decays between key and query lower a score.

    python train.py --config configs/fox.py:tiny
    python train.py --config configs/fox.py

The gates tell the model the order of the tokens, so model.positions is "none"
(arXiv:2503.02130).

Expected: a held-out loss of 1.875 nats/byte after 300 steps of `:tiny`. Softmax reaches
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
    config.model.positions = "none"
    config.model.attention.forget = "fox"
    return config
