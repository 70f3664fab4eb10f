"""Errors of feature-map attention against exact softmax of the same queries and keys.

A is the exact map (softmax in float64), and Â the map computed with feature maps. There
are two errors, both relative, in Frobenius norms, and means over heads:

    error of the map     |Â − A| / |A|
    error of the output  |(Â − A) V| / |A V|

The first table has errors of random features of the model's own queries and keys. It
has every kind that estimates softmax, and projections of 16, 64, 256 and 1024 rows,
orthogonal or independent. Hyperbolic and trigonometric features are two per row. The
errors are measured on the first 128 tokens of one held-out window. They are means over
64 projections, with their standard errors. FAVOR++ and FAVOR# need statistics of
queries and keys. These statistics are computed for each layer on another held-out
window, if there is one.

The second table has errors of the layers of the model that use features themselves, on
a few held-out windows.

Both tables also have the errors of the uniform average of the visible keys.

Source: Choromanski et al. 2021, arXiv:2009.14794 (positive, hyperbolic, orthogonal);
Likhosherstov et al. 2022, arXiv:2205.15317 (FAVOR++), 2023, arXiv:2302.00787 (FAVOR#).
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
from symjax.evaluation.measures.reading import Layer, by_layer, read
from symjax.evaluation.measures.windows import heldout_rows, visible_pairs
from symjax.evaluation.results import Options, Result, Table, progress, series, table
from symjax.figures import Lines
from symjax.layers.parts.table import part_of
from symjax.models.build import attentions

FEATURES = (16, 64, 256, 1024)  # numbers of rows of a projection
KINDS = ("positive", "hyperbolic", "trigonometric", "favor++", "favor#")
DRAWS = 64  # projections for each row of the first table
LARGEST_ERROR = 2.0  # the largest error in figures; trigonometric features reach 70
LONGEST = 128  # the most tokens of the window on which random features are measured

Maps = Float[np.ndarray, "N T T"]


class Heads(NamedTuple):
    """Branches of all heads of a layer on one window; N counts heads · branches.

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
    """Measure the errors of random features, and those of the model's own features."""
    causal = config.is_causal(run.config.model)
    own = _errors_of_layers(run, options)
    windows = [inputs for inputs, _ in heldout_rows(run, options)]
    windows = sorted(windows, key=lambda inputs: -(inputs >= 0).sum())
    layers, others = (read(run.model(), x) for x in (windows[0], windows[:2][-1]))
    heads = [heads_of(layer, causal=causal, length=LONGEST) for layer in layers]
    samples = [heads_of(layer, causal=causal) for layer in others]
    references = [errors(x.uniform, x.exact, x.value) for x in heads]
    uniform = np.mean(references, axis=0).tolist()
    rows, sizes = [], (heads[0].query.shape[-1], options.seed)
    tried = [(kind, count) for kind in KINDS for count in FEATURES]
    for kind, count in progress(tried, "random features"):
        statistics = [statistics_of(kind, sample) for sample in samples]
        for draw in ("orthogonal", "independent"):
            projections = drawn_projections(draw, count, *sizes)
            of_layers = [
                random_errors(x, kind, projections, y, causal=causal)
                for x, y in zip(heads, statistics, strict=True)
            ]
            row = {"features": kind, "count": count, "rows": draw}
            rows.append(row | _mean_and_error(np.mean(of_layers, axis=0)))
    measured = ("error of map", "± map", "error of output", "± output")
    columns = ("features", "count", "rows", *measured)
    cells = [tuple(row.values()) for row in rows]
    cells.append(("uniform average", None, None, uniform[0], None, uniform[1], None))
    tables = [Table("approximation", columns, cells)]
    text = [
        "relative errors against softmax of the model's own queries and keys;",
        f"random features on one window of at most {LONGEST} tokens: means over "
        f"{DRAWS} draws ± standard errors",
    ]
    if own:
        measured = ("map", "output", "map if uniform", "output if uniform")
        columns = ("layer", "mechanism", *measured)
        tables.append(table("approximation_own", columns, own))
        text.append("second table: the model's own features")
    values = {"own": own, "random": rows, "uniform": uniform}
    figures = (
        _figure(values, "approximation", "orthogonal"),
        _figure(values, "approximation_independent", "independent"),
    )
    return Result({"approximation": values}, text, tuple(tables), figures)


def _mean_and_error(of_draws: Float[np.ndarray, "2 D"]) -> dict[str, float]:
    """Return the means over draws of both errors, and their standard errors."""
    count = of_draws.shape[1]
    spread = of_draws.std(axis=1, ddof=1) if count > 1 else np.full(2, np.nan)
    named = zip(("map", "output"), of_draws.mean(axis=1), spread, strict=True)
    return {
        key: float(number)
        for name, mean, deviation in named
        for key, number in ((name, mean), (f"{name}_se", deviation / count**0.5))
    }


def _figure(values: dict[str, Any], name: str, rows: str) -> Lines:
    """Return the curves of the error of the output, with bands of ± standard errors.

    Points with an error above `LARGEST_ERROR` are left out.
    """
    points, edges = [], []
    for row in values["random"]:
        mean, error = row["output"], row["output_se"]
        if row["rows"] == rows and mean <= LARGEST_ERROR:
            points.append((row["features"], row["count"], mean))
            edges.append((row["features"], mean - error, mean + error))
    ends = FEATURES[0], FEATURES[-1]
    points += [("uniform average", count, values["uniform"][1]) for count in ends]
    label, curves = "error of the output", series(points)
    limit = f"errors up to {LARGEST_ERROR:.0f}"
    title = f"Features of {rows} rows against exact softmax; {limit}"
    options = {"log_x": True, "title": title, "bands": series(edges)}
    return Lines(name, "features", label, curves, **options)


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


def _is_random(mechanism: str) -> bool:
    """Return whether a mechanism uses random features."""
    return "projection" in attention.MECHANISMS[mechanism].operands


def statistics_of(kind: str, sample: Heads) -> attention.Statistics | None:
    """Return the statistics of a sample for FAVOR++ or FAVOR#, None for other kinds."""
    if not kind.startswith("favor"):
        return None
    pair = jnp.asarray(sample.query), jnp.asarray(sample.key)
    return attention.favor_statistics(*pair, kind=kind)


def drawn_projections(
    draw: str, count: int, size: int, seed: int
) -> Float[jax.Array, "D M H"]:
    """Return `DRAWS` projections of `count` orthogonal or independent rows."""
    rngs = [jax.random.key(seed + i) for i in range(DRAWS)]
    if draw == "orthogonal":
        drawn = [attention.orthogonal_projection(rng, count, size) for rng in rngs]
    else:
        drawn = [jax.random.normal(rng, (count, size)) for rng in rngs]
    return jnp.stack(drawn)


def random_errors(
    heads: Heads,
    kind: str,
    projections: Float[jax.Array, "D M H"],
    statistics: attention.Statistics | None = None,
    *,
    causal: bool,
) -> Float[np.ndarray, "2 D"]:
    """Return the errors of map and output for each projection, means over heads."""
    pair = heads.query, heads.key
    maps = random_maps(kind, *pair, projections, statistics, causal=causal)
    return errors(np.asarray(maps), heads.exact, heads.value)


@partial(jax.jit, static_argnums=0, static_argnames="causal")
def random_maps(
    kind: str,
    query: Float[jax.Array, "N T H"],
    key: Float[jax.Array, "N T H"],
    projections: Float[jax.Array, "D M H"],
    statistics: attention.Statistics | None = None,
    *,
    causal: bool,
) -> Float[jax.Array, "D N T T"]:
    """Return the maps of random features: the output if values are unit vectors."""
    heads, length, _ = query.shape
    units = jnp.broadcast_to(jnp.eye(length)[None, :, None], (1, length, heads, length))
    query, key = (jnp.swapaxes(x, 0, 1)[None] for x in (query, key))
    attend = attention.performer_causal if causal else attention.performer

    def estimate(projection: Float[jax.Array, "M H"]) -> Float[jax.Array, "N T T"]:
        options = {"features": kind, "statistics": statistics}
        return jnp.swapaxes(attend(query, key, units, projection, **options)[0], 0, 1)

    return jax.lax.map(estimate, projections)


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
    estimate: Float[np.ndarray, "*D N T T"],
    exact: Maps,
    value: Float[np.ndarray, "N T V"],
) -> Float[np.ndarray, "2 *D"]:
    """Return |Â − A|/|A| and |(Â − A) V|/|A V| in Frobenius norms, means over heads."""

    def relative(difference: np.ndarray, reference: np.ndarray) -> np.ndarray:
        sizes = [np.linalg.norm(x, axis=(-2, -1)) for x in (difference, reference)]
        return (sizes[0] / np.where(sizes[1] == 0, 1, sizes[1])).mean(axis=-1)

    difference = estimate - exact
    return np.stack(
        [relative(difference, exact), relative(difference @ value, exact @ value)]
    )
