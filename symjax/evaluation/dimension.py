"""How large heads should be for a length: the 8 ln n rule."""

import math

from symjax.evaluation.asked import Asked
from symjax.evaluation.finding import Finding, Table
from symjax.evaluation.reading import attentions
from symjax.evaluation.trained import Trained


def needed_dimension(tokens: int) -> float:
    """8 ln n: the size of queries and keys that can tell n tokens apart.

    Source: Su Jianlin 2020, spaces.ac.cn/archives/7695.
    """
    return 8 * math.log(tokens)


def dimension(trained: Trained, asked: Asked) -> Finding:
    """The rule for some lengths, and where the heads of this model stand."""
    length = trained.options.model.length
    layers = attentions(trained.any_model())
    sizes = sorted({layer.mixer.sizes.head_size for layer in layers})
    lengths = sorted({length, 64, 256, 512, 1024, 4096, 16384, 65536})
    rows = [(n, round(needed_dimension(n), 1)) for n in lengths]
    shown = ", ".join(map(str, sizes))
    reach = ", ".join(f"{math.exp(size / 8):,.0f}" for size in sizes)
    text = [
        f"by the rule 8 ln n heads of size {shown} can tell {reach} tokens apart;",
        f"{length} tokens of training need {needed_dimension(length):.0f}",
    ]
    values = {"head_sizes": sizes, "length": length, "needed": needed_dimension(length)}
    table = Table("dimension", ("tokens", "8 ln n"), rows)
    return Finding({"dimension": values}, text, (table,))
