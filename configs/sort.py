"""Sorting: a row is a list of symbols, a separator, and the symbols in order.

    python train.py --config configs/sort.py
    python eval.py --workdir runs/sort --tasks loss,sort

A row of 32 tokens has 16 symbols, drawn from 32, and 16 answers. Guessing costs 3.47
nats per answer.

Expected with softmax: held-out losses of 0.27 nats per answer after 500 steps and 0.26
after all 600, and 88 % of the answers right. Measured on a 2-core CPU VM.
"""

from ml_collections import ConfigDict

from configs import copy


def get_config(size: str = "tiny") -> ConfigDict:
    config = copy.get_config(size)
    config.data.source = "sort"
    return config
