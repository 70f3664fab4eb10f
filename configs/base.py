"""What every configuration starts from: the defaults of symjax.config, and sizes.

3l, 6l, 8l   the models of the Shakespeare study: width 256, 8 heads, length 300,
             3, 6 or 8 layers, learned positions, LayerNorm, ReLU
tiny         width 128, 2 layers, 4 heads, length 128, RoPE: minutes on two cores
"""

from ml_collections import ConfigDict

from symjax.training.commandline import default

SIZES = ("3l", "6l", "8l", "tiny")


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
    else:
        raise ValueError(f"preset {size!r} is unknown: choose from {', '.join(SIZES)}")
    return config
