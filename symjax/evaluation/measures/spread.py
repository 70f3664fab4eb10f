"""Spread of attention over keys: entropy, support and sparsity of the rows of maps.

    entropy  H_t = −Σ_s p_ts ln p_ts in nats, with the shares p_ts = |a_ts| / Σ_s |a_ts|
    support  number of keys with a_ts ≠ 0, for sparse mechanisms; for all mechanisms the
             sum of the k largest shares, and Hoyer's sparsity of the row

A row that sees n keys has an entropy between 0 (all weight on one key) and ln n
(uniform). e^H is the effective number of keys. All numbers are means over heads and a
few held-out windows. Those of `support` are also means over rows.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from symjax import config
from symjax.attention import MECHANISMS
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.measures.attended import MAPS, Shares, shares
from symjax.evaluation.measures.reading import (
    Layer,
    mean_by_keys,
    mean_over_rows,
    nan_mean,
)
from symjax.evaluation.measures.windows import Window
from symjax.evaluation.results import Options, Result, Table, table
from symjax.figures import Lines
from symjax.models.build import attentions

TOPS = (1, 4, 16)  # numbers of largest weights whose share is measured
SPARSITY = *(f"top_{k}" for k in TOPS), "hoyer"


def entropy(run: LoadedRun, options: Options) -> Result:
    """Measure the entropy of rows by their number n of keys, beside ln n.

    In a decoder n is the position of the row, counted from 1, even if the option
    `window` or `mask_self` hides some of the n keys. In an encoder n is the number of
    tokens: windows are cut to their first n tokens (`mean_by_keys`). The slope
    dH/d ln n is 1 for uniform attention to all n keys, and 0 if the effective number of
    keys does not depend on n.
    """
    counts, means = mean_by_keys(
        run, options, lambda layer: entropies(shares(layer.map)).mean(axis=0)
    )
    shown = [n for n in 2 ** np.arange(20) if n in counts]
    causal = config.is_causal(run.config.model)
    what = "row n of |A|" if causal else "rows of |A| that see n keys"
    text = [f"entropy of {what}, in nats; slope is dH/d ln n, n ≥ 16"]
    if not causal:
        shown = counts.tolist()
        cut = "windows are cut to their first n tokens"
        if run.config.model.patch:
            cut = "an image is read whole"
        text.append(f"no causal mask: every row sees all keys that exist; {cut}")
    rows = [
        {
            "layer": layer,
            "entropy": {str(n): float(x[counts == n][0]) for n in shown},
            "slope": slope(counts, x),
        }
        for layer, x in enumerate(means)
    ]
    columns = ("layer", *(f"n={n}" for n in shown), "slope")
    cells = [(row["layer"], *row["entropy"].values(), row["slope"]) for row in rows]
    cells.append(("ln n", *(float(np.log(n)) for n in shown), 1.0))
    series = {f"layer {i}": (counts.tolist(), x.tolist()) for i, x in enumerate(means)}
    series["uniform: ln n"] = (counts.tolist(), np.log(counts).tolist())
    lines = Lines(
        "entropy",
        "number n of tokens",
        "entropy in nats",
        series,
        log_x=True,
        title="Entropy of a row of attention, by the number n of tokens",
    )
    figures = (lines,) if len(counts) > 1 else ()
    tables = (Table("entropy", columns, cells),)
    return Result({"entropy": rows}, text, tables, figures)


def entropies(shares: Shares) -> Float[np.ndarray, "*N T"]:
    """Return −Σ p ln p of every row, in nats; 0 for a row of zeros."""
    logarithms = np.log(np.where(shares > 0, shares, 1))
    return -(shares * logarithms).sum(axis=-1)


def slope(
    counts: Int[np.ndarray, " n"],
    entropy: Float[np.ndarray, " n"],
    shortest: int = 16,
) -> float | None:
    """Return dH/d ln n by least squares over rows that see `shortest` or more keys.

    None if fewer than two numbers of keys remain.
    """
    long = counts >= shortest
    if long.sum() < 2:
        return None
    return float(np.polyfit(np.log(counts[long]), entropy[long], 1)[0])


def support(run: LoadedRun, options: Options) -> Result:
    """Measure how many keys have a nonzero weight, and how unequal all weights are.

    `keys` is the mean number of nonzero weights per row of a sparse layer, and `share`
    is that number divided by the number of visible keys. Other layers have few weights
    that are exactly zero. So for all layers two more measures are taken: the shares of
    the 1, 4 and 16 largest |a| of a row, and the sparsity

        (√n − Σ|a| / √Σa²) / (√n − 1)

    of a row that sees n ≥ 2 keys, which is 0 if all |a| are equal, and 1 if only one of
    them is not 0. In a differential layer, compare A with its branches A₁ and A₂.

    Source: Hoyer 2004, Journal of Machine Learning Research 5, equation for sparseness
        (section 3.1).
    """
    mechanisms = [layer.mixer.mechanism for layer in attentions(run.model())]
    sparse = [i for i, name in enumerate(mechanisms) if MECHANISMS[name].sparse]
    unequal, of_all = _sparsities(run, options, mechanisms)
    if not sparse:
        names = ", ".join(sorted(set(mechanisms)))
        found = {"support": [], "sparsity": unequal}
        return Result(found, [f"support: {names} is not sparse"], (of_all,))

    def nonzero_keys(layer: Layer) -> np.ndarray:
        return (layer.map != 0).sum(axis=-1).mean(axis=0)

    def measure(window: Window, layer: Layer) -> np.ndarray:
        keys = nonzero_keys(layer)
        return np.stack([keys, keys / window.visible.sum(axis=-1)])

    rows, series = [], {}
    over_rows = mean_over_rows(run, options, measure)
    counts, means = mean_by_keys(run, options, nonzero_keys)
    for index in sparse:
        keys, share = over_rows[index].tolist()
        row = {"layer": index, "mechanism": mechanisms[index]}
        rows.append(row | {"keys": keys, "share": share})
        series[f"layer {index}"] = counts.tolist(), means[index].tolist()
    columns = ("layer", "mechanism", "keys with a weight", "share of those seen")
    title = "Keys with a weight, by the number n of tokens"
    lines = Lines(
        "support", "number n of tokens", "keys with a weight", series, title=title
    )
    text = ["keys whose weight is not zero, the mean over rows and heads"]
    figures = (lines,) if len(counts) > 1 else ()
    tables = table("support", columns, rows), of_all
    return Result({"support": rows, "sparsity": unequal}, text, tables, figures)


def _sparsities(
    run: LoadedRun, options: Options, mechanisms: list[str]
) -> tuple[list[dict[str, Any]], Table]:
    """Return the sparsity of the maps of every layer, as records and as a table."""

    def measure(window: Window, layer: Layer) -> np.ndarray:
        maps = [layer.map]
        if layer.lam is not None:
            maps += [layer.branches[:, branch] for branch in (0, 1)]
        counts = window.visible.sum(axis=-1)
        return np.stack([nan_mean(sparsity(x, counts), axis=1) for x in maps])

    rows = []
    for index, maps in enumerate(mean_over_rows(run, options, measure)):
        for name, numbers in zip(MAPS, maps.tolist(), strict=False):
            row = {"layer": index, "mechanism": mechanisms[index], "map": name}
            rows.append(row | dict(zip(SPARSITY, numbers, strict=True)))
    columns = ("layer", "mechanism", "map", *(f"top {k}" for k in TOPS), "Hoyer")
    return rows, table("sparsity", columns, rows)


def sparsity(
    weights: Float[np.ndarray, "N T S"], counts: Int[np.ndarray, " T"]
) -> Float[np.ndarray, "4 N T"]:
    """Return the shares of the 1, 4 and 16 largest |weights|, and Hoyer's sparsity.

    Rows of zeros have NaN. Hoyer's sparsity is also NaN in rows with fewer than two
    visible keys.

    Args:
        counts: number of keys that each row sees.
    """
    sizes = np.sort(np.abs(weights.astype(np.float64)), axis=-1)[..., ::-1]
    total, roots = sizes.sum(axis=-1), np.sqrt(counts.astype(np.float64))
    empty = total == 0
    shares = [
        sizes[..., :k].sum(axis=-1) / np.where(empty, np.nan, total) for k in TOPS
    ]
    length = np.where(empty, np.nan, np.sqrt((sizes**2).sum(axis=-1)))
    spread = np.where(counts > 1, roots - 1, np.nan)
    return np.stack([*shares, (roots - total / length) / spread])
