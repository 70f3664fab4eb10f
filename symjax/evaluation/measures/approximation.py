"""How far attention by features is from the softmax of the same queries and keys.

Two tables: what the feature mechanisms of the model itself do, layer by layer, and what
random features would do with its queries and keys, by their number, from orthogonal and
from independent projections. A uniform average of the visible keys is the reference: an
estimate with a larger error is worse than averaging.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from symjax import attention, config
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.measures.attended import uniform
from symjax.evaluation.measures.reading import (
    Layer,
    all_pairs,
    attentions,
    by_layer,
    heldout_rows,
    read,
)
from symjax.evaluation.results import Options, Result, Table, progress, series, table
from symjax.figures import Lines
from symjax.layers.parts.table import part_of

FEATURES = (16, 64, 256, 1024)
DRAWS = 4  # of every kind of projection
LONGEST = 128  # tokens of the window that random features are tried on

Rows = Float[np.ndarray, "N T T"]


class Heads(NamedTuple):
    """Every branch of every head of a layer: queries, keys, values, their softmax map,
    and the map that gives all visible keys the same weight."""

    query: Float[np.ndarray, "N T H"]
    key: Float[np.ndarray, "N T H"]
    value: Float[np.ndarray, "N T V"]
    exact: Rows
    even: Float[np.ndarray, "T T"]


def heads_of(layer: Layer, *, causal: bool, length: int | None = None) -> Heads:
    """Args: length: tokens from the start; None: all."""
    query, key = (_flat(x[..., :length, :]) for x in (layer.query, layer.key))
    value = layer.value[:, :length].astype(np.float64)
    value = np.repeat(value, layer.query.shape[1], axis=0)
    even = uniform(all_pairs(query.shape[1], causal=causal))
    return Heads(query, key, value, exact_map(query, key, causal=causal), even)


def _flat(x: Float[np.ndarray, "N P T s"]) -> Float[np.ndarray, "M T s"]:
    return x.reshape(-1, *x.shape[2:])


def approximation(run: LoadedRun, options: Options) -> Result:
    """Errors of maps and outputs against exact softmax, relative to its size."""
    causal = config.is_causal(run.config.model)
    own = _own_maps(run, options)
    rows = heldout_rows(run, options)
    longest, _ = max(rows, key=lambda row: (row[0] >= 0).sum())
    layers = read(run.model(), longest)
    layers = [heads_of(layer, causal=causal, length=LONGEST) for layer in layers]
    references = [errors(heads.even, heads.exact, heads.value) for heads in layers]
    even = np.mean(references, axis=0).tolist()
    found = []
    runs = [(kind, count) for kind in random_kinds(run) for count in FEATURES]
    for kind, count in progress(runs, "random features"):
        for draw in ("orthogonal", "independent"):
            errors_of = [
                random_errors(heads, kind, count, draw, options.seed + i, causal=causal)
                for i in range(DRAWS)
                for heads in layers
            ]
            of_map, of_output = np.mean(errors_of, axis=0).tolist()
            row = {"features": kind, "count": count, "rows": draw}
            found.append(row | {"map": of_map, "output": of_output})
    columns = ("features", "count", "rows", "error of map", "error of output")
    cells = [tuple(row.values()) for row in found]
    cells.append(("uniform average", None, None, *even))
    tables = [Table("approximation", columns, cells)]
    text = [
        "relative errors against softmax of the model's own queries and keys;",
        f"random features on one window of at most {LONGEST} tokens, {DRAWS} draws",
    ]
    if own:
        measured = ("map", "output", "map if uniform", "output if uniform")
        columns = ("layer", "mechanism", *measured)
        tables.append(table("approximation_own", columns, own))
        text.append("second table: the model's own features")
    points = [(f"{x['features']}, {x['rows']}", x["count"], x["output"]) for x in found]
    points += [("uniform average", n, even[1]) for n in (FEATURES[0], FEATURES[-1])]
    label, curves = "error of the output", series(points)
    title = "Random features against exact softmax, the model's own queries and keys"
    figure = Lines("approximation", "features", label, curves, log_x=True, title=title)
    values = {"own": own, "random": found, "uniform": even}
    return Result({"approximation": values}, text, tuple(tables), (figure,))


def _own_maps(run: LoadedRun, options: Options) -> list[dict[str, Any]]:
    """Errors of the model's own features."""
    names = [layer.mixer.mechanism for layer in attentions(run.model())]
    chosen = [i for i, x in enumerate(names) if part_of(x).features or _draws(x)]
    if not chosen:
        return []
    causal = config.is_causal(run.config.model)

    def measure(_, layer: Layer) -> Float[np.ndarray, "4"]:
        heads = heads_of(layer, causal=causal)
        maps = _flat(layer.branches), heads.even
        return np.concatenate([errors(x, heads.exact, heads.value) for x in maps])

    columns = ("map", "output", "uniform_map", "uniform_output")
    return [
        {"layer": index, "mechanism": names[index]}
        | dict(zip(columns, np.mean(found, axis=0).tolist(), strict=True))
        for index, found in by_layer(run, options, measure, chosen).items()
    ]


def random_kinds(run: LoadedRun) -> list[str]:
    """The kinds of random features to try: those of the model, or the usual ones."""
    names = [layer.mixer.mechanism for layer in attentions(run.model())]
    if not any(map(_draws, names)):
        return ["positive", "hyperbolic"]
    return [run.config.model.attention.features or "positive"]


def _draws(mechanism: str) -> bool:
    """Whether its features are random."""
    return "projection" in attention.MECHANISMS[mechanism].operands


def random_errors(
    heads: Heads, kind: str, count: int, draw: str, seed: int, *, causal: bool
) -> Float[np.ndarray, "2"]:
    """Errors of the map and the output with a new projection of `count` rows."""
    rng, size = jax.random.key(seed), heads.query.shape[-1]
    if draw == "orthogonal":
        projection = attention.orthogonal_projection(rng, count, size)
    else:
        projection = jax.random.normal(rng, (count, size))
    found = random_map(kind, heads.query, heads.key, projection, causal=causal)
    return errors(np.asarray(found), heads.exact, heads.value)


@partial(jax.jit, static_argnums=0, static_argnames="causal")
def random_map(
    kind: str,
    query: Float[jax.Array, "N T H"],
    key: Float[jax.Array, "N T H"],
    projection: Float[jax.Array, "M H"],
    *,
    causal: bool,
) -> Float[jax.Array, "N T T"]:
    """The map that random features make: their output for unit vectors."""
    heads, length, _ = query.shape
    units = jnp.broadcast_to(jnp.eye(length)[None, :, None], (1, length, heads, length))
    query, key = (jnp.swapaxes(x, 0, 1)[None] for x in (query, key))
    attend = attention.performer_causal if causal else attention.performer
    rows = attend(query, key, units, projection, features=kind)
    return jnp.swapaxes(rows[0], 0, 1)


def exact_map(
    query: Float[np.ndarray, "N T H"], key: Float[np.ndarray, "N T H"], *, causal: bool
) -> Rows:
    """Softmax attention in float64."""
    query, key = query.astype(np.float64), key.astype(np.float64)
    scores = query @ np.swapaxes(key, -1, -2) / np.sqrt(query.shape[-1])
    visible = all_pairs(scores.shape[-1], causal=causal)
    scores = np.where(visible, scores, -np.inf)
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def errors(
    found: Float[np.ndarray, "*N T T"], exact: Rows, value: Float[np.ndarray, "N T V"]
) -> Float[np.ndarray, "2"]:
    """|Â − A|/|A| and |(Â − A) V|/|A V| in Frobenius norms, the mean over heads."""

    def relative(difference: np.ndarray, whole: np.ndarray) -> float:
        sizes = [np.linalg.norm(x, axis=(1, 2)) for x in (difference, whole)]
        return float((sizes[0] / np.where(sizes[1] == 0, 1, sizes[1])).mean())

    difference = found - exact
    return np.array(
        [relative(difference, exact), relative(difference @ value, exact @ value)]
    )
