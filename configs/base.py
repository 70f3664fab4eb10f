"""The sizes that all configurations share, on top of the defaults in symjax/config.

3l, 6l, 8l   the models of the Shakespeare study: 3, 6 or 8 layers, width 256, 8 heads,
             length 300, learned positions, LayerNorm, ReLU
tiny         2 layers, width 128, 4 heads, length 128, RoPE; trains in minutes on two
             CPU cores
125m, 350m,  models for accelerators (docs/pretraining.md), named after their number of
1b, 7b       parameters with a vocabulary of 50,304: head size 128, RMSNorm, SwiGLU,
             RoPE, bfloat16, all blocks in one loop. --config.model.vocabulary=0 takes
             the vocabulary size of the tokenizer instead
"""

from ml_collections import ConfigDict

from symjax.validation import default

# Width, depth, hidden size of the feed-forward, tokens per row, rows per batch, steps
# and peak learning rate. The steps read about 20 tokens per parameter (7b: 60).
LARGE = {
    "125m": (768, 12, 2048, 2048, 256, 5_000, 6e-4),
    "350m": (1024, 24, 2816, 2048, 256, 14_000, 4e-4),
    "1b": (2048, 20, 5632, 2048, 512, 20_000, 3e-4),
    "7b": (4096, 32, 11_008, 4096, 1024, 100_000, 3e-4),
}
SIZES = ("3l", "6l", "8l", "tiny", *LARGE)
HEAD = 128  # head size of the large models: the width of a TPU's matrix unit
VOCABULARY = 50_304  # the 50,257 tokens of GPT-2, rounded up to a multiple of 128


def get_config(size: str = "3l") -> ConfigDict:
    """Return the defaults with the values of one of the SIZES.

    Raises:
        ValueError: the size is unknown.
    """
    config = default()
    config.log.attention = size not in ("1b", "7b")
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
            # Embedding and a separate output layer would have 48 % of the weights of
            # 125m, and 25 % of those of 350m.
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
    """Return the configuration of a size that recomputes less than `get_config`.

    With a TPU kernel for attention, a model of size 1b on 64 chips of 16 GB has room to
    save some of its products with weights for the backward pass. The other sizes are
    those of `get_config`.

    Args:
        remat: model.remat of size 1b: "dots" if the saved products fit, and otherwise
            "feedforward".
    """
    config = get_config(size)
    if size == "1b":
        config.model.remat = remat
    return config


fused = with_remat  # the former name, for configurations of your own


def differential(size: str = "3l") -> ConfigDict:
    """Return the configuration of a size with differential attention V1.

    The large sizes have half as many heads, so that branches have size 128 and values
    size 256, as in arXiv:2410.05258. Branches of 64 would leave half of a TPU's matrix
    unit idle.
    """
    config = with_remat(size)
    config.model.attention.differential = "v1"
    if size in LARGE:
        config.model.heads //= 2
    return config
