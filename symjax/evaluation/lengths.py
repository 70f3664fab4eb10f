"""How a model predicts by place in the window, and in longer windows than it knows."""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from symjax import attention, config
from symjax.evaluation.asked import Asked
from symjax.evaluation.averaging import averages, averaging_table
from symjax.evaluation.finding import Cell, Finding, Lines, Table
from symjax.evaluation.trained import Trained
from symjax.models.build import Model, build
from symjax.training.step import cross_entropy

FACTORS = (1, 2, 4, 8)
BATCHES = 4  # of held-out text at every length, unless --batches says otherwise
POINTS = 64  # of a curve over places


class ByPlace(NamedTuple):
    """Means over rows at every place of the window; weight 0 where nothing is asked.

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


def length(trained: Trained, asked: Asked) -> Finding:
    """Loss and accuracy at 1, 2, 4 and 8 times the length of training.

    With log-n scaling off, at evaluation only (its base the length of training), and
    as trained; and a case where it should hurt. A classifier reads longer pieces of
    its texts, as far as there are any.
    """
    model = trained.options.model
    if model.patch:
        text = f"length: none, images have {model.length} patches each"
        return Finding({"length": None}, [text])
    text, factors = [], FACTORS
    if model.positions == "learned":
        factors = (1,)
        text.append(
            f"a model with learned positions has {model.length} of them: no longer "
            "windows"
        )
    longest = trained.corpus.longest or math.inf
    enough = [x for x in factors if x * model.length <= longest]
    if enough != list(factors):
        missing = ", ".join(f"{x}×" for x in factors if x not in enough)
        text.append(f"the held-out text is too short for {missing} of {model.length}")
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    cells: list[tuple[Cell, ...]] = []
    series = {}
    options = variants(model)
    text += [f"{name}: {meaning}" for name, (_, meaning) in options.items()]
    runs = [(x, name) for x in enough for name in options]
    for factor, name in tqdm(runs, "lengths", leave=False, disable=None):
        changed = merged(trained, options[name][0])
        tokens = factor * model.length
        places = by_place(trained, changed, tokens, asked.batches or BATCHES, factor)
        loss, accuracy = places.mean()
        last = places.mean(tokens - model.length)[0]
        row = {"loss": loss, "accuracy": accuracy}
        if not model.classes:
            row["last"] = last
        found.setdefault(str(tokens), {})[name] = row
        cells.append((tokens, name, *row.values()))
        series[name] = curve(places)  # the longest stays
    columns = ("tokens", "log-n", "loss", "accuracy")
    if not model.classes:
        columns += (f"loss of last {model.length}",)
    unit = f"nats/{trained.corpus.unit}"
    text.append(f"losses in {unit}")
    tables = [Table("length", columns, cells)]
    base = max(2, model.length)
    average = averages([x * base for x in FACTORS], base, asked.seed)
    tables.append(averaging_table(average))
    text += [
        "second table: an average of n values of ±1 by scores that should be equal",
        "(N(0, 0.25)), its error in units of 1/√n, and the share of wrong majorities,",
        f"with log-n scaling off and on (base {base})",
    ]
    by_length = {
        name: ([int(n) for n in found], [row[name]["loss"] for row in found.values()])
        for name in options
    }
    figures = [Lines("length", "tokens in the window", unit, by_length, log_x=True)]
    if not model.classes:
        figures.append(Lines("length_by_place", "place", unit, series, log_x=True))
    values = {"length": found, "averaging": average}
    return Finding(values, text, tuple(tables), tuple(figures) if found else ())


def position(trained: Trained, asked: Asked) -> Finding:
    """Held-out loss by place in a window as long as those of training."""
    model, unit = trained.options.model, f"nats/{trained.corpus.unit}"
    if model.classes:
        text = "position: none, a label stands at no place of the window"
        return Finding({"position": None}, [text])
    batches = asked.batches or 4 * BATCHES
    places = by_place(trained, trained.any_model(), model.length, batches)
    edges = [2**i for i in range(30) if 2**i < model.length]
    rows = []
    for start, stop in zip([0, *edges], [*edges, model.length], strict=True):
        if (loss := places.mean(start, stop)[0]) is not None:
            rows.append({"from": int(start + 1), "to": int(stop), "loss": loss})
    cells = [tuple(row.values()) for row in rows]
    lines = Lines(
        "position",
        "place",
        unit,
        {"held-out loss": curve(places)},
        log_x=True,
    )
    return Finding(
        {"position": rows},
        [f"held-out loss by place in a window of {model.length}, in {unit}"],
        (Table("position", ("from", "to", "loss"), cells),),
        (lines,),
    )


def variants(model: config.Model) -> dict[str, tuple[config.Model, str]]:
    """The models to compare, by name, and what the name means."""

    def scaled(base: int) -> config.Model:
        chosen = dataclasses.replace(model.attention, length_base=base)
        return dataclasses.replace(model, attention=chosen)

    names = model.pattern or (model.attention.mechanism,)
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


def merged(trained: Trained, model: config.Model) -> Model:
    """The trained weights under other options that do not change their shapes."""
    like = nnx.eval_shape(lambda: build(model, rngs=nnx.Rngs(jax.random.key(0))))
    return nnx.merge(nnx.graphdef(like), trained.params, trained.constants)


def by_place(
    trained: Trained, model: Model, tokens: int, batches: int, factor: int = 1
) -> ByPlace:
    """Loss and accuracy at every place of held-out windows of `tokens` tokens.

    Args:
        batches: as many as have these tokens at the length of training; `factor` times
            longer rows are as many fewer, unless every row has one label.
    """
    rows, classes = trained.options.batch_size, trained.options.model.classes
    if not classes:
        rows = max(1, rows // factor)
    graph, weights = nnx.split(model)
    sums = np.zeros((3, 1 if classes else tokens))
    for chosen in trained.corpus.heldout_batches((rows, tokens), batches):
        inputs, targets, weight = chosen(0, rows)
        loss, right = map(np.asarray, _scored(graph, weights, inputs, targets))
        sums += [(weight * x).sum(axis=0) for x in (loss, right, np.ones_like(loss))]
    weight = np.maximum(sums[2], 1)
    return ByPlace(sums[0] / weight, sums[1] / weight, sums[2])


@partial(jax.jit, static_argnums=0)
def _scored(
    graph: nnx.GraphDef,
    weights: Any,
    inputs: Int[Array, "B T"],
    targets: Int[Array, "B T"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    logits = nnx.merge(graph, weights)(inputs)
    right = logits.argmax(axis=-1) == targets
    return cross_entropy(logits, jnp.maximum(targets, 0)), right.astype(jnp.float32)


def curve(places: ByPlace) -> tuple[list[float], list[float]]:
    """(place, loss) with at most 64 points, each the mean of as many places or more."""
    seen = np.flatnonzero(places.weight)
    parts = np.array_split(seen, min(POINTS, len(seen)))
    x = [float(part.mean() + 1) for part in parts]
    return x, [
        float(np.average(places.loss[part], weights=places.weight[part]))
        for part in parts
    ]
