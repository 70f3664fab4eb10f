"""What every configuration starts from: the defaults of symjax.config, and sizes.

3l, 6l, 8l   the models of the Shakespeare study: width 256, 8 heads, length 300,
             3, 6 or 8 layers, learned positions, LayerNorm, ReLU
tiny         width 128, 2 layers, 4 heads, length 128, RoPE: minutes on two cores
1b, 7b       about 1e9 and 7e9 parameters: heads of 128, RMSNorm, SwiGLU, RoPE,
             bfloat16, blocks as one loop; for many accelerators (docs/scaling.md)
"""

from ml_collections import ConfigDict

from symjax.training.commandline import default

SIZES = ("3l", "6l", "8l", "tiny", "1b", "7b")
LARGE = ("1b", "7b")


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
        config.model.update(
            positions="rope",
            norm="rmsnorm",
            activation="swiglu",
            bias=False,
            dtype="bfloat16",
            remat="full",
            scan_layers=True,
        )
        # Tokens of a batch grow with the model: one million, and four.
        if size == "1b":
            config.model.update(width=2048, depth=20, heads=16, length=2048)
            config.model.feedforward = 5632
            config.update(batch_size=512, steps=20_000)
        else:
            config.model.update(width=4096, depth=32, heads=32, length=4096)
            config.model.feedforward = 11_008
            config.update(batch_size=1024, steps=100_000)
    else:
        raise ValueError(f"preset {size!r} is unknown: choose from {', '.join(SIZES)}")
    return config


def fused(size: str = "3l") -> ConfigDict:
    """For attention by the fused kernel for TPU, which leaves 64 chips of 16 GB room to
    keep most projections of a model of 1b, instead of computing them twice."""
    config = get_config(size)
    if size == "1b":
        config.model.remat = "dots"
    return config


def differential(size: str = "3l") -> ConfigDict:
    """Differential attention V1. The large sizes have half as many heads, with branches
    of 128 and values of 256 as in arXiv:2410.05258: branches of 64 would leave half of
    a TPU's matrix unit idle."""
    config = fused(size)
    config.model.attention.differential = "v1"
    if size in LARGE:
        config.model.heads //= 2
    return config
