"""What every configuration starts from: the defaults of symjax.config, and sizes.

3l, 6l, 8l   the models of the Shakespeare study: width 256, 8 heads, length 300,
             3, 6 or 8 layers, learned positions, LayerNorm, ReLU
tiny         width 128, 2 layers, 4 heads, length 128, RoPE: minutes on two cores
125m, 350m,  about as many parameters with a vocabulary of 50,304: heads of 128,
1b, 7b       RMSNorm, SwiGLU, RoPE, bfloat16, blocks as one loop; for accelerators
             (docs/pretraining.md). --config.model.vocabulary=0 is the tokenizer's own
"""

from ml_collections import ConfigDict

from symjax.validation import default

# Width, depth, hidden features of the feed-forward, tokens of a row, rows of a batch,
# steps (about 20 tokens a parameter; of 7b 60), peak learning rate.
LARGE = {
    "125m": (768, 12, 2048, 2048, 256, 5_000, 6e-4),
    "350m": (1024, 24, 2816, 2048, 256, 14_000, 4e-4),
    "1b": (2048, 20, 5632, 2048, 512, 20_000, 3e-4),
    "7b": (4096, 32, 11_008, 4096, 1024, 100_000, 3e-4),
}
SIZES = ("3l", "6l", "8l", "tiny", *LARGE)
HEAD = 128  # features of a head of a large model: the width of a TPU's matrix unit
VOCABULARY = 50_304  # the 50,257 tokens of GPT-2, to a multiple of 128


def get_config(size: str = "3l") -> ConfigDict:
    config = default()
    if size in ("3l", "6l", "8l"):
        config.model.depth = int(size[0])
        config.model.dropout = 0.1
        config.optimizer.learning_rate = 2e-3
    elif size == "tiny":
        config.model.update(width=128, depth=2, heads=4, length=128, positions="rope")
        config.update(batch_size=8, steps=3000)
        config.optimizer.learning_rate = 4e-3
    elif size in LARGE:
        width, depth, hidden, length, rows, steps, rate = LARGE[size]
        config.update(batch_size=rows, steps=steps)
        config.optimizer.learning_rate = rate
        config.model.update(
            vocabulary=VOCABULARY,
            width=width,
            depth=depth,
            heads=width // HEAD,
            feedforward=hidden,
            length=length,
            # Two tables would be a third of the weights of a small model.
            tie_embeddings=size in ("125m", "350m"),
            positions="rope",
            norm="rmsnorm",
            activation="swiglu",
            bias=False,
            dtype="bfloat16",
            remat="full",
            scan_layers=True,
        )
    else:
        raise ValueError(f"preset {size!r} is unknown: choose from {', '.join(SIZES)}")
    return config


def with_remat(size: str = "3l", remat: str = "dots") -> ConfigDict:
    """Return the base configuration with another `model.remat` for the size 1b.

    Attention kernels leave memory on 64 chips of 16 GB to keep products with weights
    instead of computing them twice.

    Args:
        remat: the value of model.remat that fits; most kernels leave room for "dots".
    """
    config = get_config(size)
    if size == "1b":
        config.model.remat = remat
    return config


fused = with_remat  # the former name, for configurations of your own


def differential(size: str = "3l") -> ConfigDict:
    """Differential attention V1. The large sizes have half as many heads, with branches
    of 128 and values of 256 as in arXiv:2410.05258: branches of 64 would leave half of
    a TPU's matrix unit idle."""
    config = with_remat(size)
    config.model.attention.differential = "v1"
    if size in LARGE:
        config.model.heads //= 2
    return config
