"""How far attention by features is from the softmax of the same queries and keys.

Two tables: what the feature mechanisms of the model itself do, layer by layer, and what
random features would do with its queries and keys, by their number, from orthogonal and
from independent projections. A uniform average of the visible keys is the reference: an
estimate that is no better has estimated nothing.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from symjax import attention, config
from symjax.evaluation.asked import Asked
from symjax.evaluation.attended import uniform
from symjax.evaluation.finding import Finding, Lines, Table
from symjax.evaluation.inside import all_pairs, windows
from symjax.evaluation.reading import Layer, attentions
from symjax.evaluation.trained import Trained

FEATURES = (16, 64, 256, 1024)
DRAWS = 4  # of every kind of projection
LONGEST = 128  # tokens of the window that random features are tried on
BY_FEATURES = ("linear", "cosine", "performer")

Rows = Float[np.ndarray, "N T T"]


def approximation(trained: Trained, asked: Asked) -> Finding:
    """Errors of maps and outputs against exact softmax, relative to its size."""
    causal = config.is_causal(trained.options.model)
    own, layers = _own_maps(trained, asked)
    layers = [_start(layer) for layer in layers]
    kinds = random_kinds(trained)
    found = []
    references = [errors(_even(x, causal), *_exact(x, causal)) for x in layers]
    even = np.mean(references, axis=0)
    runs = [(kind, count) for kind in kinds for count in FEATURES]
    for kind, count in tqdm(runs, "random features", leave=False, disable=None):
        for draw in ("orthogonal", "independent"):
            errors_of = [
                random_errors(layer, kind, count, draw, asked.seed + i, causal=causal)
                for i in range(DRAWS)
                for layer in layers
            ]
            of_map, of_output = np.mean(errors_of, axis=0).tolist()
            row = {"features": kind, "count": count, "rows": draw}
            found.append(row | {"map": of_map, "output": of_output})
    columns = ("features", "count", "rows", "error of map", "error of output")
    cells = [tuple(row.values()) for row in found]
    cells.append(("uniform average", None, None, *even.tolist()))
    tables = [Table("approximation", columns, cells)]
    text = [
        "relative errors against softmax of the model's own queries and keys;",
        f"random features on one window of at most {LONGEST} tokens, {DRAWS} draws",
    ]
    if own:
        measured = ("map", "output", "map if uniform", "output if uniform")
        columns = ("layer", "mechanism", *measured)
        rows = [tuple(row.values()) for row in own]
        tables.append(Table("approximation_own", columns, rows))
        text.append("second table: the model's own features")
    values = {"own": own, "random": found, "uniform": even.tolist()}
    figure = _figure(found, float(even[1]))
    return Finding({"approximation": values}, text, tuple(tables), (figure,))


def random_kinds(trained: Trained) -> list[str]:
    """The kinds of random features to try: those of the model, or the usual ones."""
    chosen = trained.options.model.attention
    performers = [
        layer
        for layer in attentions(trained.any_model())
        if layer.mixer.mechanism == "performer"
    ]
    if not performers:
        return ["positive", "hyperbolic"]
    return [chosen.features or "positive"]


def random_errors(
    layer: Layer, kind: str, count: int, draw: str, seed: int, *, causal: bool
) -> Float[np.ndarray, "2"]:
    """Errors of a layer's map and output with a new projection of `count` rows."""
    rng, size = jax.random.key(seed), layer.query.shape[-1]
    if draw == "orthogonal":
        projection = attention.orthogonal_projection(rng, count, size)
    else:
        projection = jax.random.normal(rng, (count, size))
    given = _flat(layer.query), _flat(layer.key), projection
    found = random_map(kind, *given, causal=causal)
    return errors(np.asarray(found), *_exact(layer, causal))


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
    found: Rows, exact: Rows, value: Float[np.ndarray, "N T V"]
) -> Float[np.ndarray, "2"]:
    """|Â − A|/|A| and |(Â − A) V|/|A V| in Frobenius norms, the mean over heads."""

    def relative(difference: np.ndarray, whole: np.ndarray) -> float:
        sizes = [np.linalg.norm(x, axis=(1, 2)) for x in (difference, whole)]
        return float((sizes[0] / np.where(sizes[1] == 0, 1, sizes[1])).mean())

    difference = found - exact
    return np.array(
        [relative(difference, exact), relative(difference @ value, exact @ value)]
    )


def _own_maps(trained: Trained, asked: Asked) -> tuple[list[dict], list[Layer]]:
    """Errors of the model's own features, and the layers of the longest window."""
    names = [layer.mixer.mechanism for layer in attentions(trained.any_model())]
    causal = config.is_causal(trained.options.model)
    found: dict[int, list[np.ndarray]] = {}
    longest: list[Layer] = []
    for window in windows(trained, asked):
        if not longest or len(window.visible) > len(longest[0].hidden):
            longest = window.layers
        for index, layer in enumerate(window.layers):
            if names[index] in BY_FEATURES:
                exact = _exact(layer, causal)
                own = errors(_flat(layer.branches), *exact)
                both = np.concatenate([own, errors(_even(layer, causal), *exact)])
                found.setdefault(index, []).append(both)
    columns = ("map", "output", "uniform_map", "uniform_output")
    rows = [
        {"layer": index, "mechanism": names[index]}
        | dict(zip(columns, np.mean(own, axis=0).tolist(), strict=True))
        for index, own in found.items()
    ]
    return rows, longest


def _start(layer: Layer) -> Layer:
    """Queries, keys and values of the first tokens."""
    query, key, value = (x[..., :LONGEST, :] for x in layer[:3])
    return layer._replace(query=query, key=key, value=value)


def _exact(layer: Layer, causal: bool) -> tuple[Rows, np.ndarray]:
    """The softmax map of every branch, and the values that it meets."""
    value = np.repeat(layer.value.astype(np.float64), layer.query.shape[1], axis=0)
    return exact_map(_flat(layer.query), _flat(layer.key), causal=causal), value


def _even(layer: Layer, causal: bool) -> Rows:
    heads, branches, length, _ = layer.query.shape
    even = uniform(all_pairs(length, causal=causal))
    return np.broadcast_to(even, (heads * branches, length, length))


def _flat(x: Float[np.ndarray, "N P T s"]) -> Float[np.ndarray, "M T s"]:
    return x.reshape(-1, *x.shape[2:])


def _figure(found: list[dict], even: float) -> Lines:
    series: dict[str, tuple[list[float], list[float]]] = {}
    for row in found:
        x, y = series.setdefault(f"{row['features']}, {row['rows']}", ([], []))
        x.append(row["count"])
        y.append(row["output"])
    ends = [float(FEATURES[0]), float(FEATURES[-1])]
    series["uniform average"] = ends, [even, even]
    return Lines("approximation", "features", "error of the output", series, log_x=True)
