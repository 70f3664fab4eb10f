"""Loss by position in the window, and in windows longer than those of training.

    position  held-out loss at the positions 1, 2, 3–4, 5–8, … of a window of the
              training length: lower at later positions if the model uses its context
    length    held-out loss in windows of 1, 2, 4 and 8 times the training length, with
              log-n scaling off and on; and the error of attention that should average
              all values, with and without log-n scaling

Losses are in nats per token (per answer or label), on a few held-out batches.

Log-n scaling multiplies scores by c = log n / log base, where n is the number of
visible keys. A row that attends to a few of n keys then still does so for larger n.
Log-n scaling costs accuracy if a row should average n values, because it also scales
the noise of scores that should be equal. With scores from N(0, σ²) the weights w have
Σ w² ≈ exp(c²σ²)/n, so the average of n values of variance 1 has the error
√((exp(c²σ²) − 1)/n).
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
    not_applicable,
    progress,
    series,
    table,
)
from symjax.figures import Curve, Lines, smoothed
from symjax.models.build import Model, merged
from symjax.training.loss import hidden_of, token_losses

FACTORS = (1, 2, 4, 8)  # lengths of windows, divided by the training length
BATCHES = 4  # held-out batches at each length, unless --batches says otherwise
POINTS = 64  # the most points of a curve over positions
OCTAVES = 0.25  # width of the smoothing of a curve, in octaves of the position
EXAMPLES = 256  # number of averages for each n
SPREAD = 0.5  # σ of scores that should be equal, in the second table

Chosen = tuple[int, str, config.Model]  # factor, name and configuration of a model


class ByPosition(NamedTuple):
    """Means over rows at every position of the window.

    The weight of a position is the number of its targets. A classifier has one
    position, that of its label.
    """

    loss: Float[np.ndarray, "T"]
    accuracy: Float[np.ndarray, "T"]
    weight: Float[np.ndarray, "T"]

    def mean(self, start: int = 0, stop: int | None = None) -> list[float | None]:
        """Return loss and accuracy over the positions from `start` up to `stop`."""
        part = slice(start, stop)
        if not self.weight[part].any():
            return [None, None]
        weights = self.weight[part]
        return [float(np.average(x[part], weights=weights)) for x in self[:2]]


def length(run: LoadedRun, options: Options) -> Result:
    """Measure loss and accuracy in windows of 1, 2, 4 and 8 times the training length.

    The model is measured with log-n scaling off, with log-n scaling at evaluation only
    (base: the training length), and as trained. It is measured only as trained if it
    has `length_scale`, or no mechanism with log-n scaling. With --rope_scaling it is
    also measured with RoPE scaled by (window length) / (training length), at evaluation
    only. A classifier reads longer pieces of its texts, if there are any. "last" is the
    loss of the last tokens of a window, as many as a training window has.

    A loss that rises with the length means that the model cannot use windows longer
    than those of its training.
    """
    model, unit = run.config.model, f"nats/{run.examples.unit}"
    if model.patch:
        return not_applicable("length", f"images have {model.length} patches each")
    factors, text = _factors(run)
    models = variants(model)
    text += [f"{name}: {meaning}" for name, (_, meaning) in models.items()]
    kinds, rope_lines = _rope_kinds(model, options.rope_scaling)
    text += rope_lines
    results: dict[str, dict[str, dict[str, float | None]]] = {}
    cells, curves = [], {}
    for factor, name, chosen in progress(_models(model, factors, kinds), "lengths"):
        changed = merged(chosen, run.params, run.constants)
        tokens = factor * model.length
        places = by_position(run, changed, tokens, options.batches or BATCHES, factor)
        loss, accuracy = places.mean()
        row = {"loss": loss, **_bits(run, loss), "accuracy": accuracy}
        if not model.classes:
            row["last"] = places.mean(tokens - model.length)[0]
        results.setdefault(str(tokens), {})[name] = row
        cells.append((tokens, name, *row.values()))
        curves[f"log-n {name}"] = curve(places)  # the longest window's curve stays
    last = () if model.classes else (f"loss of last {model.length}",)
    variant = "log-n, RoPE" if kinds else "log-n"
    columns = ("tokens", variant, "loss", *_bits(run, 0.0), "accuracy", *last)
    base = max(2, model.length)
    averaging = averages([x * base for x in FACTORS], base, options.seed)
    text += [
        f"losses in {unit}, {_batches_text(run, options.batches or BATCHES)}",
        "second table: attention with scores from N(0, 0.25), which should be equal,",
        "averages n values of ±1; error of the average in units of 1/√n, and share of",
        f"averages with the wrong sign, with log-n scaling off and on (base {base})",
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
        figures.append(_by_position_figure("length_by_place", unit, curves))
    values = {"length": results, "averaging": averaging}
    return Result(values, text, tables, tuple(figures) if results else ())


def _models(
    model: config.Model, factors: list[int], rope_kinds: tuple[str, ...]
) -> list[Chosen]:
    """Return the models to measure, in ascending order of the window length."""
    chosen = [
        (factor, name, variant)
        for factor in factors
        for name, (variant, _) in variants(model).items()
    ]
    chosen += [
        (factor, f"rope {kind}", rope_scaled(model, kind, factor))
        for factor in factors
        for kind in rope_kinds
        if factor > 1
    ]
    return sorted(chosen, key=lambda x: x[0])


def _bits(run: LoadedRun, loss: float | None) -> dict[str, float | None]:
    """Return a loss as bits per byte of the text; {} if the examples are no text."""
    if run.examples.text is None:
        return {}
    bits = run.examples.text.bits_per_byte
    return {"bits_per_byte": None if loss is None else bits(loss)}


def _batches_text(run: LoadedRun, batches: int) -> str:
    """Return in words on how many held-out batches losses are measured."""
    total = run.examples.heldout_count((run.config.batch_size, run.config.model.length))
    return f"on {min(batches, total)} of {total} held-out batches"


def _factors(run: LoadedRun) -> tuple[list[int], list[str]]:
    """Return the factors that can be measured, and lines that say why others cannot."""
    size, factors, text = run.config.model.length, FACTORS, []
    if run.config.model.positions == "learned":
        factors = (1,)
        text.append(
            f"longer windows cannot be measured: the model has {size} learned positions"
        )
    longest = run.examples.longest or math.inf
    missing = ", ".join(f"{x}×" for x in factors if x * size > longest)
    if missing:
        text.append(f"the held-out text is too short for {missing} {size} tokens")
    return [x for x in factors if x * size <= longest], text


def position(run: LoadedRun, options: Options) -> Result:
    """Measure held-out loss by position in windows of the training length.

    Position n predicts its target from n tokens. A loss that falls up to the end of the
    window means that the model uses all of its context.
    """
    model, unit = run.config.model, f"nats/{run.examples.unit}"
    if model.classes:
        return not_applicable("position", "a label has no place in the window")
    batches = options.batches or 4 * BATCHES
    places = by_position(run, run.model(), model.length, batches)
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
            f"{_batches_text(run, batches)}"
        ],
        (table("position", ("from", "to", "loss", *_bits(run, 0.0)), rows),),
        (_by_position_figure("position", unit, curves),),
    )


def variants(model: config.Model) -> dict[str, tuple[config.Model, str]]:
    """Return the log-n variants of a model: name → (configuration, meaning)."""

    def scaled(base: int) -> config.Model:
        chosen = dataclasses.replace(model.attention, length_base=base)
        return dataclasses.replace(model, attention=chosen)

    names = config.mechanisms_of(model)
    forms = [attention.MECHANISMS[x] for x in names if x in attention.MECHANISMS]
    if not any("length_base" in mechanism.options for mechanism in forms):
        return {"none": (model, f"{', '.join(names)} has no log-n scaling")}
    if law := model.attention.length_scale:
        return {"trained": (model, f"length_scale {law}, as trained")}
    length = max(2, model.length)  # log 1 is 0
    models = {
        "off": (scaled(0), "no log-n scaling"),
        "evaluation": (scaled(length), f"base {length}, at evaluation only"),
    }
    base = model.attention.length_base
    if base:
        return models | {"trained": (model, f"base {base}, as trained")}
    return models | {"off": (model, "no log-n scaling, as trained")}


def _rope_kinds(
    model: config.Model, kinds: tuple[str, ...]
) -> tuple[tuple[str, ...], list[str]]:
    """Return the kinds of RoPE scaling that can be measured, and a line about them."""
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
    """Return a model with RoPE scaled for windows `factor` times as long."""
    lengths: dict[str, Any] = {}
    if kind in OF_A_LENGTH:
        lengths["original_length"] = model.length
    scaling = config.RopeScaling(kind=kind, factor=float(factor), **lengths)
    return dataclasses.replace(model, rope_scaling=scaling)


def by_position(
    run: LoadedRun, model: Model, tokens: int, batches: int, factor: int = 1
) -> ByPosition:
    """Return loss and accuracy at every position of held-out windows.

    Args:
        tokens: length of the windows.
        batches: number of held-out batches.
        factor: `tokens` divided by the training length. The number of rows of a batch
            is divided by it, so that all lengths read equally many tokens, except in
            classifiers.
    """
    rows, classes = run.config.batch_size, run.config.model.classes
    if not classes:
        rows = max(1, rows // factor)
    graph, weights = nnx.split(model)
    sums = np.zeros((3, 1 if classes else tokens))
    for chosen in run.examples.heldout_batches((rows, tokens), batches):
        inputs, targets, weight = chosen(0, rows)
        loss, right = map(np.asarray, _losses(graph, weights, inputs, targets))
        sums += [(weight * x).sum(axis=0) for x in (loss, right, np.ones_like(loss))]
    weight = np.maximum(sums[2], 1)
    return ByPosition(sums[0] / weight, sums[1] / weight, sums[2])


@partial(jax.jit, static_argnums=0)
def _losses(
    graph: nnx.GraphDef,
    weights: Any,
    inputs: Any,
    targets: Int[Array, "B T"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Return the loss of every target, and 1 where the prediction is right."""
    model = nnx.merge(graph, weights)
    judged = token_losses(model, hidden_of(model, inputs), targets)
    return judged.loss, judged.right.astype(jnp.float32)


def _by_position_figure(name: str, unit: str, curves: Mapping[str, Curve]) -> Lines:
    """Plot losses by position with curves, smoothed over the logarithm of positions."""
    lines = {
        label: (x, smoothed(np.log2(x), y, OCTAVES)) for label, (x, y) in curves.items()
    }
    title = "Held-out loss by the place in the window, measured and smoothed"
    label = "place in the window, in tokens"
    return Lines(name, label, unit, lines, log_x=True, title=title, points=curves)


def curve(places: ByPosition) -> tuple[list[float], list[float]]:
    """Return (positions, losses) with at most 64 points.

    Each point is the mean of neighbouring positions.
    """
    weighted = np.flatnonzero(places.weight)
    parts = np.array_split(weighted, min(POINTS, len(weighted)))
    x = [float(part.mean() + 1) for part in parts]
    return x, [
        float(np.average(places.loss[part], weights=places.weight[part]))
        for part in parts
    ]


def averages(lengths: list[int], base: float, seed: int) -> list[dict[str, float]]:
    """Return errors of averages of n values ±1, with log-n scaling off and on.

    A row of softmax attention should average n values, so its scores should be equal.
    Here they are drawn from N(0, 0.25). "average" is the root mean square error in
    units of 1/√n, the standard deviation of the true average. For comparison: the
    average of a random half of the values has an error of 1. "majority" is the fraction
    of averages with the wrong sign.
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
            average = softmax(jnp.ones((EXAMPLES, 1, 1, 1)), key, value)
            average = np.asarray(average, np.float64)[:, 0, 0, 0]
            error = np.sqrt(n * np.mean((average - true) ** 2))
            clear = true != 0
            wrong = np.sign(average[clear]) != np.sign(true[clear])
            row |= {f"average_{name}": float(error)}
            row |= {f"majority_{name}": float(wrong.mean())}
        rows.append(row)
    return rows
