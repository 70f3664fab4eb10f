"""Symmetry and direction of the bilinear forms W_q W_kᵀ of scores (task `symmetry`).

With W = W_q W_kᵀ the score of a query token x and a key token y is xᵀ W y, before
positions. Two numbers in [−1, 1] describe the matrix W [D D]:

    symmetry   (|S|² − |N|²) / |W|² = tr(W²) / |W|², with S and N the symmetric and
               the skew part of W: 1 for W = Wᵀ, −1 for W = −Wᵀ, about 0 for random W
    direction  (c − r) / (c + r), with c the sum of the lengths of the outlier columns
               of W, and r the same for rows. Outliers exceed the mean length of columns
               (or rows) by more than two standard deviations. 1 if only columns have
               outliers, −1 if only rows have, 0 for W = Wᵀ

Row i of W multiplies entry i of the query token, and column j entry j of the key token.
Encoders are reported to become symmetric, and decoders to have large columns.

Biases, norms of queries and keys, convolutions and rotations by positions are left out.

Source: Saponati et al. 2025, arXiv:2502.10927, definitions 3.1 and 3.2.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from symjax import attention
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.results import Options, Result, series, table
from symjax.figures import Lines
from symjax.layers.attention import Attention
from symjax.models.attention_maps import by_branch
from symjax.models.build import attentions

OUTLIER = 2  # standard deviations above the mean length of rows or columns

Factor = Float[np.ndarray, "*N D H"]  # Q or K of W = Q Kᵀ


def symmetry(run: LoadedRun, options: Options) -> Result:
    """Measure the symmetry and the direction of W_q W_kᵀ, by layer.

    W of a layer is the sum of W over its heads and branches, as in the source.
    `symmetry of heads` and `direction of heads` are measured for each head and branch,
    and averaged.
    """
    # A Universal Transformer repeats one layer, which has one row in the table.
    layers = list({id(layer): layer for layer in attentions(run.model())}.values())
    rows, others = [], []
    for index, layer in enumerate(layers):
        if not isinstance(layer, Attention):
            others.append(layer.mixer.mechanism)
            continue
        query, key = factors(layer)
        whole = (np.concatenate(list(x), axis=-1) for x in (query, key))
        scores = scores_of(*whole)
        heads = scores_of(query, key).mean(axis=-1)
        row = {"layer": index, "symmetry": scores[0], "direction": scores[1]}
        row |= {"symmetry_of_heads": heads[0], "direction_of_heads": heads[1]}
        rows.append(
            {name: x if name == "layer" else float(x) for name, x in row.items()}
        )
    columns = (
        "layer",
        "symmetry",
        "direction",
        "symmetry of heads",
        "direction of heads",
    )
    text = [
        "symmetry of W = W_q W_kᵀ: 1 for W = Wᵀ, −1 for W = −Wᵀ",
        "direction: above 0 if columns (keys) stand out, below 0 if rows (queries) do",
    ]
    if others:
        names = ", ".join(sorted(set(others)))
        text.append(f"no W_q W_kᵀ, since queries are not linear in tokens: {names}")
    if not rows:
        return Result({"symmetry": rows}, text[2:])
    names = ("symmetry", "direction")
    points = [(name, row["layer"], row[name]) for name in names for row in rows]
    title = "Symmetry and direction of W_q W_kᵀ, by layer"
    lines = Lines("symmetry", "layer", "score", series(points), title=title)
    return Result(
        {"symmetry": rows}, text, (table("symmetry", columns, rows),), (lines,)
    )


def factors(layer: Attention) -> tuple[Factor, Factor]:
    """Return the weights of queries and keys [N D H] of all heads and branches.

    Weights that several heads share are repeated. For symmetric attention the weights
    of keys are computed from those of queries.
    """
    sizes = layer.mixer.sizes

    def weights(name: str) -> Float[np.ndarray, "1 D K H"]:
        kernel = np.asarray(getattr(layer, name).kernel[...], np.float32)
        return kernel.reshape(1, len(kernel), -1, sizes.head_size)

    query = key = jnp.asarray(weights("query"))
    if layer.symmetric in ("none", "kv"):
        key = jnp.asarray(weights("key"))
    elif layer.symmetric == "pairwise":
        key = attention.symmetric_key(query, layer.metric[...])
    pair = by_branch(layer.mixer, query, key, sizes.kv_heads)
    first, second = (np.asarray(x[0], np.float64) for x in pair)
    return first.reshape(-1, *first.shape[2:]), second.reshape(-1, *second.shape[2:])


def scores_of(query: Factor, key: Factor) -> Float[np.ndarray, "2 *N"]:
    """Return symmetry and direction of Q Kᵀ; 0 where they are not defined.

    The matrix [D D] is not formed: cost O(D H²).
    """
    query_grams, key_grams, mixed = (
        np.swapaxes(x, -1, -2) @ y
        for x, y in ((query, query), (key, key), (key, query))
    )
    size = (query_grams * key_grams).sum(axis=(-2, -1))
    trace = (mixed * np.swapaxes(mixed, -1, -2)).sum(axis=(-2, -1))
    rows = ((query @ key_grams) * query).sum(axis=-1)
    columns = ((key @ query_grams) * key).sum(axis=-1)
    r, c = (_outliers(np.sqrt(np.maximum(x, 0))) for x in (rows, columns))
    return np.stack([_ratio(trace, size), _ratio(c - r, c + r)])


def _outliers(lengths: Float[np.ndarray, "*N D"]) -> Float[np.ndarray, "*N"]:
    """Return the sum of the lengths above the mean by two standard deviations."""
    mean, spread = (f(axis=-1, keepdims=True) for f in (lengths.mean, lengths.std))
    limit = (mean + OUTLIER * spread) * (1 + 1e-9)  # equal lengths are no outliers
    return np.where(lengths > limit, lengths, 0).sum(axis=-1)


def _ratio(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.where(y == 0, 0, x / np.where(y == 0, 1, y))
