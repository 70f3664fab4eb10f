"""Universal Transformer: one block for all steps, as many of them as a token needs.

    python train.py --config configs/universal.py:tiny
    python train.py --config configs/universal.py

One block has the weights of one layer and, at depth steps, the cost of depth layers.

Measured on two CPU cores, standard library of Python 3.11, all of the held-out text:
`:tiny --config.steps=300` 2.086 nats/byte, 264,961 parameters, two steps for each
of 1,024 tokens. The whole 3000 steps and the larger sizes were not measured.
The trigram line is 1.848.
"""

from ml_collections import ConfigDict

from configs import base

LARGE = {  # width, and hidden features of the feed-forward
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
    elif size in base.LARGE:  # one block of that size, and few steps
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
