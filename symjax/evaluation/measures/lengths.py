"""Loss by place in the window, and in windows longer than those of training.

Log-n scaling multiplies scores by log n / log base, so that a row that attends to a
few keys still does so among more of them. It costs accuracy where a row should average
n values: scores that should be equal have noise, which is scaled too. With scores from
N(0, σ²) and c = log n / log base the weights have Σ w² ≈ exp(c²σ²)/n, so that the
average of n values of variance 1 is off by √((exp(c²σ²) − 1)/n).
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from symjax import attention, config
from symjax.attention.rope_scaling import OF_A_LENGTH
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.results import (
    Options,
    Result,
    Table,
    none,
    progress,
    series,
    table,
)
from symjax.figures import Curve, Lines, smoothed
from symjax.models.build import Model, merged
from symjax.training.loss import hidden_of, token_losses

FACTORS = (1, 2, 4, 8)
BATCHES = 4  # of held-out text at every length, unless --batches says otherwise
POINTS = 64  # of a curve over places
OCTAVES = 0.25  # of places: the width within which a curve is smoothed
EXAMPLES = 256  # averages of n values
SPREAD = 0.5  # σ of their scores, which should all be equal


class ByPlace(NamedTuple):
    """Means over rows at every place of the window; weight 0 where there is no target.

    Of a classifier at one place, that of its label.
    """

    loss: Float[np.ndarray, "T"]
    accuracy: Float[np.ndarray, "T"]
    weight: Float[np.ndarray, "T"]

    def mean(self, start: int = 0, stop: int | None = None) -> list[float | None]:
        """Loss and accuracy over the places from `start` up to `stop`."""
        part = slice(start, stop)
        if not self.weight[part].any():
            return [None, None]
        weights = self.weight[part]
        return [float(np.average(x[part], weights=weights)) for x in self[:2]]


def length(run: LoadedRun, options: Options) -> Result:
    """Loss and accuracy at 1, 2, 4 and 8 times the length of training.

    With log-n scaling off, at evaluation only (its base the length of training), and
    as trained; and its cost in an average. With --rope_scaling also with RoPE scaled
    by the factor of the window, at evaluation only. A classifier reads longer pieces of
    its texts, as far as there are any.
    """
    model, unit = run.config.model, f"nats/{run.examples.unit}"
    if model.patch:
        return none("length", f"images have {model.length} patches each")
    factors, text = _factors(run)
    models = variants(model)
    text += [f"{name}: {meaning}" for name, (_, meaning) in models.items()]
    kinds, said = _rope_kinds(model, options.rope_scaling)
    text += said
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    cells, curves = [], {}
    runs = [(x, name, chosen) for x in factors for name, (chosen, _) in models.items()]
    runs += [
        (x, f"rope {kind}", rope_scaled(model, kind, x))
        for x in factors
        for kind in kinds
        if x > 1
    ]
    runs.sort(key=lambda run: run[0])  # by the length of the window
    for factor, name, chosen in progress(runs, "lengths"):
        changed = merged(chosen, run.params, run.constants)
        tokens = factor * model.length
        places = by_place(run, changed, tokens, options.batches or BATCHES, factor)
        loss, accuracy = places.mean()
        row = {"loss": loss, **_bits(run, loss), "accuracy": accuracy}
        if not model.classes:
            row["last"] = places.mean(tokens - model.length)[0]
        found.setdefault(str(tokens), {})[name] = row
        cells.append((tokens, name, *row.values()))
        curves[f"log-n {name}"] = curve(places)  # the longest stays
    last = () if model.classes else (f"loss of last {model.length}",)
    variant = "log-n, RoPE" if kinds else "log-n"
    columns = ("tokens", variant, "loss", *_bits(run, 0.0), "accuracy", *last)
    base = max(2, model.length)
    averaging = averages([x * base for x in FACTORS], base, options.seed)
    text += [
        f"losses in {unit}, {_on(run, options.batches or BATCHES)}",
        "second table: an average of n values of ±1 by scores that should be equal",
        "(N(0, 0.25)), its error in units of 1/√n, and the share of wrong majorities,",
        f"with log-n scaling off and on (base {base})",
    ]
    states = ("average, off", "majority, off", "average, on", "majority, on")
    tables = (
        Table("length", columns, cells),
        table("averaging", ("n", *states), averaging),
    )
    points = series((f"log-n {name}", n, loss) for n, name, loss, *_ in cells)
    title = "Held-out loss by the tokens of the window"
    figures = [
        Lines("length", "tokens in the window", unit, points, log_x=True, title=title)
    ]
    if not model.classes:
        figures.append(_by_place_figure("length_by_place", unit, curves))
    values = {"length": found, "averaging": averaging}
    return Result(values, text, tables, tuple(figures) if found else ())


def _bits(run: LoadedRun, loss: float | None) -> dict[str, float | None]:
    """A loss in nats a token as bits a byte of its text; {} where there is no text."""
    if run.examples.text is None:
        return {}
    bits = run.examples.text.bits_per_byte
    return {"bits_per_byte": None if loss is None else bits(loss)}


def _on(run: LoadedRun, batches: int) -> str:
    """Say on how many held-out batches a measurement is: the task `loss` may use
    others."""
    total = run.examples.heldout_count((run.config.batch_size, run.config.model.length))
    return f"on {min(batches, total)} of {total} held-out batches"


def _factors(run: LoadedRun) -> tuple[list[int], list[str]]:
    """Those of the length of training that can be measured, and why not the others."""
    size, factors, text = run.config.model.length, FACTORS, []
    if run.config.model.positions == "learned":
        factors = (1,)
        text.append(
            f"a model with learned positions has {size} of them: no longer windows"
        )
    longest = run.examples.longest or math.inf
    missing = ", ".join(f"{x}×" for x in factors if x * size > longest)
    if missing:
        text.append(f"the held-out text is too short for {missing} of {size}")
    return [x for x in factors if x * size <= longest], text


def position(run: LoadedRun, options: Options) -> Result:
    """Held-out loss by place in a window as long as those of training."""
    model, unit = run.config.model, f"nats/{run.examples.unit}"
    if model.classes:
        return none("position", "a label has no place in the window")
    batches = options.batches or 4 * BATCHES
    places = by_place(run, run.model(), model.length, batches)
    edges = [2**i for i in range(30) if 2**i < model.length]
    rows = []
    for start, stop in zip([0, *edges], [*edges, model.length], strict=True):
        if (loss := places.mean(start, stop)[0]) is not None:
            row = {"from": int(start + 1), "to": int(stop), "loss": loss}
            rows.append(row | _bits(run, loss))
    curves = {"held-out loss": curve(places)}
    return Result(
        {"position": rows},
        [
            f"held-out loss by place in a window of {model.length}, in {unit}, "
            f"{_on(run, batches)}"
        ],
        (table("position", ("from", "to", "loss", *_bits(run, 0.0)), rows),),
        (_by_place_figure("position", unit, curves),),
    )


def variants(model: config.Model) -> dict[str, tuple[config.Model, str]]:
    """The models to compare, by name, and what the name means."""

    def scaled(base: int) -> config.Model:
        chosen = dataclasses.replace(model.attention, length_base=base)
        return dataclasses.replace(model, attention=chosen)

    names = config.mechanisms_of(model)
    known = [attention.MECHANISMS[x] for x in names if x in attention.MECHANISMS]
    if not any("length_base" in mechanism.options for mechanism in known):
        return {"none": (model, f"{', '.join(names)} has no log-n scaling")}
    now = max(2, model.length)  # log 1 is 0
    found = {
        "off": (scaled(0), "no log-n scaling"),
        "evaluation": (scaled(now), f"base {now}, at evaluation only"),
    }
    base = model.attention.length_base
    if base:
        return found | {"trained": (model, f"base {base}, as trained")}
    return found | {"off": (model, "no log-n scaling, as trained")}


def _rope_kinds(
    model: config.Model, kinds: tuple[str, ...]
) -> tuple[tuple[str, ...], list[str]]:
    """The kinds of RoPE scaling that can be measured, and a line about them."""
    if not kinds:
        return (), []
    if not model.positions.startswith("rope"):
        return (), [f"no RoPE to scale: model.positions is {model.positions!r}"]
    if model.rope_scaling.kind != "none":
        kind = model.rope_scaling.kind
        return (), [f"RoPE is not scaled again: model.rope_scaling.kind is {kind!r}"]
    line = "rope KIND: model.rope_scaling of this kind by the factor of the window,"
    return kinds, [f"{line} at evaluation only"]


def rope_scaled(model: config.Model, kind: str, factor: int) -> config.Model:
    """The model as it reads windows `factor` times as long as those of training."""
    given: dict[str, Any] = {}
    if kind in OF_A_LENGTH:
        given["original_length"] = model.length
    chosen = config.RopeScaling(kind=kind, factor=float(factor), **given)
    return dataclasses.replace(model, rope_scaling=chosen)


def by_place(
    run: LoadedRun, model: Model, tokens: int, batches: int, factor: int = 1
) -> ByPlace:
    """Loss and accuracy at every place of held-out windows of `tokens` tokens.

    Args:
        batches: as many as have these tokens at the length of training; `factor` times
            longer rows are as many fewer, unless every row has one label.
    """
    rows, classes = run.config.batch_size, run.config.model.classes
    if not classes:
        rows = max(1, rows // factor)
    graph, weights = nnx.split(model)
    sums = np.zeros((3, 1 if classes else tokens))
    for chosen in run.examples.heldout_batches((rows, tokens), batches):
        inputs, targets, weight = chosen(0, rows)
        loss, right = map(np.asarray, _scored(graph, weights, inputs, targets))
        sums += [(weight * x).sum(axis=0) for x in (loss, right, np.ones_like(loss))]
    weight = np.maximum(sums[2], 1)
    return ByPlace(sums[0] / weight, sums[1] / weight, sums[2])


@partial(jax.jit, static_argnums=0)
def _scored(
    graph: nnx.GraphDef,
    weights: Any,
    inputs: Any,
    targets: Int[Array, "B T"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    model = nnx.merge(graph, weights)
    found = token_losses(model, hidden_of(model, inputs), targets)
    return found.loss, found.right.astype(jnp.float32)


def _by_place_figure(name: str, unit: str, curves: Mapping[str, Curve]) -> Lines:
    """Curves over places, smoothed in the logarithm of the place."""
    lines = {
        label: (x, smoothed(np.log2(x), y, OCTAVES)) for label, (x, y) in curves.items()
    }
    title = "Held-out loss by the place in the window, measured and smoothed"
    label = "place in the window, in tokens"
    return Lines(name, label, unit, lines, log_x=True, title=title, points=curves)


def curve(places: ByPlace) -> tuple[list[float], list[float]]:
    """(place, loss) with at most 64 points, each the mean of as many places or more."""
    seen = np.flatnonzero(places.weight)
    parts = np.array_split(seen, min(POINTS, len(seen)))
    x = [float(part.mean() + 1) for part in parts]
    return x, [
        float(np.average(places.loss[part], weights=places.weight[part]))
        for part in parts
    ]


def averages(lengths: list[int], base: float, seed: int) -> list[dict[str, float]]:
    """Errors of the average and of the majority of n values ±1, scaling off and on.

    Errors are root mean squares, in units of 1/√n, the standard deviation of the true
    average; averaging a random half of the values has an error of 1.
    """
    rows = []
    for n in lengths:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), n))
        key = SPREAD * jax.random.normal(keys[0], (EXAMPLES, n, 1, 1))
        value = jax.random.rademacher(keys[1], key.shape, key.dtype)
        true = np.asarray(value, np.float64).mean(axis=(1, 2, 3))
        row: dict[str, float] = {"n": n}
        for name, length_base in (("off", None), ("on", base)):
            softmax = partial(attention.softmax, scale=1.0, length_base=length_base)
            found = softmax(jnp.ones((EXAMPLES, 1, 1, 1)), key, value)
            found = np.asarray(found, np.float64)[:, 0, 0, 0]
            error = np.sqrt(n * np.mean((found - true) ** 2))
            clear = true != 0
            wrong = np.sign(found[clear]) != np.sign(true[clear])
            row |= {f"average_{name}": float(error)}
            row |= {f"majority_{name}": float(wrong.mean())}
        rows.append(row)
    return rows
