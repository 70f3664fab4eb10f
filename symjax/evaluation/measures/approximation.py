"""Errors of feature-map attention against exact softmax of the same queries and keys.

With the exact map A (softmax in float64) and the map Â that features make, errors are
relative, in Frobenius norms, and means over heads:

    error of the map     |Â − A| / |A|
    error of the output  |(Â − A) V| / |A V|

There are two tables. The first replaces the attention of the model by random features
of its own queries and keys: 16, 64, 256, 1024 features from orthogonal and from
independent projections, on one held-out window. The second measures the layers of the
model that use features themselves, on a few windows (`reading`). The reference is the
uniform average of the visible keys: an error above it is worse than averaging.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from symjax import attention, config
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.measures.attended import uniform_map
from symjax.evaluation.measures.reading import (
    Layer,
    by_layer,
    heldout_rows,
    read,
    visible_pairs,
)
from symjax.evaluation.results import Options, Result, Table, progress, series, table
from symjax.figures import Lines
from symjax.layers.parts.table import part_of
from symjax.models.build import attentions

FEATURES = (16, 64, 256, 1024)  # numbers of random features
DRAWS = 4  # projections drawn for each row of the table
LONGEST = 128  # tokens of the window of random features

Maps = Float[np.ndarray, "N T T"]


class Heads(NamedTuple):
    """Branches of all heads of a layer on one window.

    Attributes:
        exact: softmax map of the queries and keys.
        uniform: the map that gives all visible keys the same weight.
    """

    query: Float[np.ndarray, "N T H"]
    key: Float[np.ndarray, "N T H"]
    value: Float[np.ndarray, "N T V"]
    exact: Maps
    uniform: Float[np.ndarray, "T T"]


def heads_of(layer: Layer, *, causal: bool, length: int | None = None) -> Heads:
    """Return the heads of a layer for the first `length` tokens; None means all."""
    query, key = (_merge_branches(x[..., :length, :]) for x in (layer.query, layer.key))
    value = layer.value[:, :length].astype(np.float64)
    value = np.repeat(value, layer.query.shape[1], axis=0)
    uniform = uniform_map(visible_pairs(query.shape[1], causal=causal))
    return Heads(query, key, value, exact_map(query, key, causal=causal), uniform)


def _merge_branches(x: Float[np.ndarray, "N P T s"]) -> Float[np.ndarray, "M T s"]:
    return x.reshape(-1, *x.shape[2:])


def approximation(run: LoadedRun, options: Options) -> Result:
    """Measure the errors of the module docstring: random features, then own layers."""
    causal = config.is_causal(run.config.model)
    own = _errors_of_layers(run, options)
    rows = heldout_rows(run, options)
    longest, _ = max(rows, key=lambda row: (row[0] >= 0).sum())
    layers = read(run.model(), longest)
    layers = [heads_of(layer, causal=causal, length=LONGEST) for layer in layers]
    references = [errors(heads.uniform, heads.exact, heads.value) for heads in layers]
    uniform = np.mean(references, axis=0).tolist()
    rows = []
    tried = [(kind, count) for kind in random_kinds(run) for count in FEATURES]
    for kind, count in progress(tried, "random features"):
        for draw in ("orthogonal", "independent"):
            of_draws = [
                random_errors(heads, kind, count, draw, options.seed + i, causal=causal)
                for i in range(DRAWS)
                for heads in layers
            ]
            of_map, of_output = np.mean(of_draws, axis=0).tolist()
            row = {"features": kind, "count": count, "rows": draw}
            rows.append(row | {"map": of_map, "output": of_output})
    columns = ("features", "count", "rows", "error of map", "error of output")
    cells = [tuple(row.values()) for row in rows]
    cells.append(("uniform average", None, None, *uniform))
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
    points = [(f"{x['features']}, {x['rows']}", x["count"], x["output"]) for x in rows]
    points += [("uniform average", n, uniform[1]) for n in (FEATURES[0], FEATURES[-1])]
    label, curves = "error of the output", series(points)
    title = "Random features against exact softmax, the model's own queries and keys"
    figure = Lines("approximation", "features", label, curves, log_x=True, title=title)
    values = {"own": own, "random": rows, "uniform": uniform}
    return Result({"approximation": values}, text, tuple(tables), (figure,))


def _errors_of_layers(run: LoadedRun, options: Options) -> list[dict[str, Any]]:
    """Return the errors of the layers that use features themselves."""
    names = [layer.mixer.mechanism for layer in attentions(run.model())]
    layers = [i for i, x in enumerate(names) if part_of(x).features or _is_random(x)]
    if not layers:
        return []
    causal = config.is_causal(run.config.model)

    def measure(_, layer: Layer) -> Float[np.ndarray, "4"]:
        heads = heads_of(layer, causal=causal)
        maps = _merge_branches(layer.branches), heads.uniform
        return np.concatenate([errors(x, heads.exact, heads.value) for x in maps])

    columns = ("map", "output", "uniform_map", "uniform_output")
    return [
        {"layer": index, "mechanism": names[index]}
        | dict(zip(columns, np.mean(windows, axis=0).tolist(), strict=True))
        for index, windows in by_layer(run, options, measure, layers).items()
    ]


def random_kinds(run: LoadedRun) -> list[str]:
    """Return the kinds of random features to try.

    If the model uses random features, they are of its own kind.
    """
    names = [layer.mixer.mechanism for layer in attentions(run.model())]
    if not any(map(_is_random, names)):
        return ["positive", "hyperbolic"]
    return [run.config.model.attention.features or "positive"]


def _is_random(mechanism: str) -> bool:
    """Return whether a mechanism uses random features."""
    return "projection" in attention.MECHANISMS[mechanism].operands


def random_errors(
    heads: Heads, kind: str, count: int, draw: str, seed: int, *, causal: bool
) -> Float[np.ndarray, "2"]:
    """Return the errors of map and output for a new projection of `count` rows."""
    rng, size = jax.random.key(seed), heads.query.shape[-1]
    if draw == "orthogonal":
        projection = attention.orthogonal_projection(rng, count, size)
    else:
        projection = jax.random.normal(rng, (count, size))
    estimate = random_map(kind, heads.query, heads.key, projection, causal=causal)
    return errors(np.asarray(estimate), heads.exact, heads.value)


@partial(jax.jit, static_argnums=0, static_argnames="causal")
def random_map(
    kind: str,
    query: Float[jax.Array, "N T H"],
    key: Float[jax.Array, "N T H"],
    projection: Float[jax.Array, "M H"],
    *,
    causal: bool,
) -> Float[jax.Array, "N T T"]:
    """Return the attention map of random features: their output for unit vectors."""
    heads, length, _ = query.shape
    units = jnp.broadcast_to(jnp.eye(length)[None, :, None], (1, length, heads, length))
    query, key = (jnp.swapaxes(x, 0, 1)[None] for x in (query, key))
    attend = attention.performer_causal if causal else attention.performer
    rows = attend(query, key, units, projection, features=kind)
    return jnp.swapaxes(rows[0], 0, 1)


def exact_map(
    query: Float[np.ndarray, "N T H"], key: Float[np.ndarray, "N T H"], *, causal: bool
) -> Maps:
    """Return the map of softmax attention, in float64."""
    query, key = query.astype(np.float64), key.astype(np.float64)
    scores = query @ np.swapaxes(key, -1, -2) / np.sqrt(query.shape[-1])
    visible = visible_pairs(scores.shape[-1], causal=causal)
    scores = np.where(visible, scores, -np.inf)
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def errors(
    estimate: Float[np.ndarray, "*N T T"],
    exact: Maps,
    value: Float[np.ndarray, "N T V"],
) -> Float[np.ndarray, "2"]:
    """Return |Â − A|/|A| and |(Â − A) V|/|A V| in Frobenius norms, means over heads."""

    def relative(difference: np.ndarray, reference: np.ndarray) -> float:
        sizes = [np.linalg.norm(x, axis=(1, 2)) for x in (difference, reference)]
        return float((sizes[0] / np.where(sizes[1] == 0, 1, sizes[1])).mean())

    difference = estimate - exact
    return np.array(
        [relative(difference, exact), relative(difference @ value, exact @ value)]
    )
