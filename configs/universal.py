"""Universal Transformer: one block is repeated until each token halts.

    python train.py --config configs/universal.py:tiny
    python train.py --config configs/universal.py

The model has the weights of one layer, and costs as much as `depth` layers: all tokens
are computed in every step, those that have halted too.

Expected: a held-out loss of 2.086 nats/byte after 300 steps of `:tiny`, which has
264,961 parameters. Each of 1,024 tokens then took two steps. A table of trigrams
reaches 1.848.

Measured with --config.steps=300 --config.data.documents=joined on two CPU cores, on all
held-out text of the standard library of Python 3.11. The 3000 steps of `:tiny` and the
larger sizes were not measured.
"""

from ml_collections import ConfigDict

from configs import base

LARGE = {  # width, and hidden size of the feed-forward
    "125m": (1536, 8192),
    "350m": (3072, 16_384),
    "1b": (6144, 28_672),
    "7b": (16_384, 98_304),
}


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.kind = "universal"
    if size == "tiny":
        config.model.depth = 4
    elif size in base.LARGE:  # one block has all parameters, and is repeated 8 times
        width, hidden = LARGE[size]
        config.model.update(
            width=width,
            feedforward=hidden,
            heads=width // base.HEAD,
            tie_embeddings=True,
            depth=8,
            scan_layers=False,
        )
    return config
