"""Draw the maps of the pages on mechanisms, by the functions that the pages describe.

    python docs/mechanisms/draw.py [NAME …]

The map of a mechanism is its output for unit vectors as values. A query or key is a
random vector of its word plus noise, so equal words have similar queries and keys.
"""

import io
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from symjax import attention
from symjax.figures import Grid, Panels, png

FOLDER = Path(__file__).resolve().parent
WORDS = "the cat saw the dog and the dog saw the cat run".split()
TOKENS, SIZE = len(WORDS), 16
DPI, COLOURS = 80, 224  # of the pictures
UNITS = jnp.eye(TOKENS)[None, :, None]  # [B T N V] as values


def vectors(seed: int, noise: float = 0.5, count: int = 1) -> jax.Array:
    """Draw queries or keys [1 T count H]."""
    rng = np.random.default_rng(0)
    known = {word: rng.normal(size=SIZE) for word in dict.fromkeys(WORDS)}
    words = np.stack([known[word] for word in WORDS])[:, None]
    own = np.random.default_rng(seed).normal(size=(TOKENS, count, SIZE))
    return jnp.asarray(words + noise * own, jnp.float32)[None]


QUERY, KEY = vectors(1), vectors(2)
UNIT_KEY = KEY / jnp.linalg.norm(KEY, axis=-1, keepdims=True)
CAUSAL = {"is_causal": True}
BETA = jnp.full((1, TOKENS, 1), 0.9)
# A gate for every token: "and" ends a clause.
GATE = jnp.asarray([[[-1.5 if word == "and" else -0.05] for word in WORDS]])


def panel(title: str, weights: jax.Array, causal: bool = True) -> Grid:
    rows = np.asarray(weights, float)[0, :, 0].tolist()
    if causal:
        rows = [row[: t + 1] + [None] * (TOKENS - 1 - t) for t, row in enumerate(rows)]
    return Grid("map", "key", "query", WORDS, WORDS, rows, title)


def softmax() -> list[Grid]:
    one = partial(attention.softmax, QUERY, KEY, UNITS, **CAUSAL)
    return [panel("softmax", one()), panel("softmax, window=4", one(window=4))]


def symmetric() -> list[Grid]:
    one = partial(attention.symmetric, QUERY, UNITS, **CAUSAL)
    return [
        panel("own keys", attention.softmax(QUERY, KEY, UNITS, **CAUSAL)),
        panel("K = Q", one()),
        panel("K = Q, key of length 1", one(normalise="unit")),
        panel("K = Q, mask_self=True", one(mask_self=True)),
    ]


def differential() -> list[Grid]:
    query, key = vectors(1, 1.0, 2), vectors(2, 1.0, 2)
    branch = [
        attention.softmax(query[:, :, i : i + 1], key[:, :, i : i + 1], UNITS, **CAUSAL)
        for i in (0, 1)
    ]
    both = attention.differential(query, key, UNITS, 0.5, **CAUSAL)
    return [
        panel("first branch, A₁", branch[0]),
        panel("second branch, A₂", branch[1]),
        panel("A₁ − λA₂, λ = 0.5", both),
    ]


def cosine() -> list[Grid]:
    return [
        panel("softmax", attention.softmax(QUERY, KEY, UNITS, **CAUSAL)),
        panel("cosine", attention.cosine(QUERY, KEY, UNITS, **CAUSAL)),
    ]


def performer() -> list[Grid]:
    small = QUERY / 1.5, KEY / 1.5

    def estimate(count: int, features: str = "positive") -> jax.Array:
        projection = attention.orthogonal_projection(jax.random.key(0), count, SIZE)
        return attention.performer_causal(*small, UNITS, projection, features=features)

    return [
        panel("softmax", attention.softmax(*small, UNITS, **CAUSAL)),
        panel("16 features", estimate(16)),
        panel("256 features", estimate(256)),
        panel("16 hyperbolic", estimate(16, "hyperbolic")),
    ]


def linear() -> list[Grid]:
    names = "elu", "relu2", "squared", "taylor"
    maps = (attention.linear_causal(QUERY, KEY, UNITS, features=x) for x in names)
    return [panel(name, x) for name, x in zip(names, maps, strict=True)]


def decay() -> list[Grid]:
    one = partial(attention.decay_causal, QUERY / SIZE, UNIT_KEY, UNITS)
    return [
        panel("no decay", one(jnp.zeros(1))),
        panel("a decay per head, 0.7 per token", one(jnp.log(jnp.full(1, 0.7)))),
        panel("a gate per token, closed at and", one(GATE)),
    ]


def delta() -> list[Grid]:
    query = QUERY / SIZE
    written = attention.decay_causal(query, UNIT_KEY, UNITS, jnp.zeros(1))
    one = partial(attention.delta_causal, query, UNIT_KEY, UNITS, BETA)
    return [
        panel("only written", written),
        panel("erased, then written", one()),
        panel("with a gate, closed at and", one(log_decay=GATE)),
    ]


def gau() -> list[Grid]:
    near = partial(attention.flash_causal, QUERY, KEY, group_size=4, linear_divisor=64)
    return [
        panel("gau: relu²", attention.gau(QUERY, KEY, UNITS, divisor=TOKENS, **CAUSAL)),
        panel("flash: groups of 4", near(QUERY, KEY, UNITS, divisor=TOKENS)),
    ]


def sparse() -> list[Grid]:
    functions: dict[str, Callable] = {
        "softmax": attention.softmax,
        "entmax15": attention.entmax15,
        "sparsemax": attention.sparsemax,
    }
    return [panel(x, f(QUERY, KEY, UNITS, **CAUSAL)) for x, f in functions.items()]


def spectral() -> list[Grid]:
    names = "exp", "expm1", "resolvent"
    maps = (attention.matrix_function(QUERY, UNITS, name) for name in names)
    return [panel(x, f, causal=False) for x, f in zip(names, maps, strict=True)]


PICTURES: dict[str, tuple[Callable[[], list[Grid]], str]] = {
    "softmax": (softmax, "Softmax attention"),
    "symmetric": (symmetric, "Symmetric attention"),
    "differential": (differential, "Differential attention"),
    "cosine": (cosine, "Cosine attention"),
    "performer": (performer, "Performer: estimates of one map"),
    "linear": (linear, "Linear attention by its features"),
    "decay": (decay, "Linear attention with decay"),
    "delta": (delta, "The delta rule"),
    "gau": (gau, "Gated attention units"),
    "sparse": (sparse, "Sparse maps"),
    "spectral": (spectral, "f(QQᵀ), without a causal mask"),
}


def picture(name: str) -> bytes:
    panels, title = PICTURES[name]
    drawn = png(Panels(name, title, tuple(panels())), dpi=DPI)
    small = io.BytesIO()
    Image.open(io.BytesIO(drawn)).convert("RGB").quantize(COLOURS).save(small, "png")
    return small.getvalue()


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        path = FOLDER / f"{name}.png"
        path.write_bytes(picture(name))
        print(f"{path.name}: {path.stat().st_size:,} bytes")
