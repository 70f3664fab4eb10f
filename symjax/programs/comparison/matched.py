"""The feed-forward size that gives a configuration the baseline's size or cost.

--match parameters counts the trained weights, --match flops the operations of a forward
pass per token by formula (`models.cost`). Both grow linearly with model.feedforward,
the number of hidden features of the feed-forward, so two models give the line and the
size follows. Only this key changes: the heads, their sizes, the width and the depth
remain those of the configuration, and with them all that attention computes. A change
of the width would also change the size of heads.
"""

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax

from symjax import config
from symjax.data.examples import open_examples
from symjax.models import cost
from symjax.models.build import abstract, parts
from symjax.programs.comparison.runs import Plan
from symjax.training.preflight import with_vocabulary

KEY = "model.feedforward"
MEASURES = ("parameters", "flops")
UNITS = {"parameters": "parameters", "flops": "FLOPs per token"}
# Multiples to try, the largest first: accelerators are slower at other sizes.
STEPS = (128, 64, 32, 16, 8, 4, 2)
NEAR = 0.01  # relative distance from the baseline that a multiple may have
FAR = 0.02  # no size comes so near to the baseline: the comparison is refused


class Match(NamedTuple):
    """Feed-forward size of a configuration, and how close it comes to the baseline.

    Attributes:
        before: the size that the configuration has itself.
        feedforward: the size that it gets.
        amount: parameters or FLOPs per token with this size.
        wanted: those of the baseline.
    """

    name: str
    before: int
    feedforward: int
    measure: str
    amount: float
    wanted: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {KEY} {self.before} → {self.feedforward}, "
            f"{self.amount:,.0f} {UNITS[self.measure]}, "
            f"{self.amount / self.wanted - 1:+.2%} of the baseline's {self.wanted:,.0f}"
        )


def match_plan(plan: Plan, baseline: str, measure: str) -> tuple[Plan, list[Match]]:
    """Return the plan with matched feed-forward sizes, and a match per configuration.

    The configurations of a plan differ in nothing else. Data are opened, because the
    number of parameters depends on the vocabulary. Values of --tune are matched each,
    and the match of the first is returned.

    Args:
        baseline: the configuration that stays as it is.
        measure: "parameters" or "flops".
    Raises:
        ValueError: a configuration has no feed-forward, or no size is close enough.
    """
    first = next(iter(plan[baseline].values()))[0].config
    wanted = amount_of(_complete(first).model, measure)
    matched: Plan = {}
    matches = []
    for name, values in plan.items():
        matched[name] = {}
        for value, commands in values.items():
            if name == baseline and commands[0].config.model == first.model:
                matched[name][value] = commands
                continue
            model = _complete(commands[0].config).model
            found = match_model(name, model, measure, wanted)
            matched[name][value] = [
                x._replace(config=_with_feedforward(x.config, found.feedforward))
                for x in commands
            ]
            if value == next(iter(values)):
                matches.append(found)
    return matched, matches


def match_model(name: str, model: config.Model, measure: str, wanted: float) -> Match:
    """Return the feed-forward size that comes close to `wanted`.

    It is the largest multiple of 128, 64, … 2 within 1 %, or else the closest size.

    Args:
        model: with the vocabulary of the data.
    Raises:
        ValueError: the blocks have no feed-forward, or the closest size is more than
            2 % away.
    """

    def amount(size: int) -> float:
        try:
            return amount_of(dataclasses.replace(model, feedforward=size), measure)
        except ValueError as error:
            raise ValueError(f"--match sets {KEY}: {name}: {error}") from None

    low, high = 8, 16  # any two sizes but 0, which means 4·width
    slope = (amount(high) - amount(low)) / (high - low)
    exact = low + (wanted - amount(low)) / slope
    multiples = (max(1, round(exact / step)) * step for step in STEPS)
    near = (x for x in multiples if abs(x - exact) * slope <= NEAR * wanted)
    size = next(near, max(1, round(exact)))
    before = model.feedforward or 4 * model.width
    found = Match(name, before, size, measure, amount(size), wanted)
    if abs(found.amount / wanted - 1) > FAR:
        raise ValueError(f"--match {measure}: no size is close enough: {found}")
    return found


@functools.cache
def amount_of(model: config.Model, measure: str) -> float:
    """Return the parameters of a model, or the FLOPs of its forward pass per token."""
    weights, _ = parts(abstract(model))
    parameters = sum(x.size for x in jax.tree.leaves(weights))
    if measure == "parameters":
        return parameters
    return cost.forward_flops(model, parameters)


def _with_feedforward(options: config.Config, size: int) -> config.Config:
    """Return the configuration with so many hidden features of the feed-forward."""
    model = dataclasses.replace(options.model, feedforward=size)
    return dataclasses.replace(options, model=model)


def _complete(options: config.Config) -> config.Config:
    """Return the configuration with the vocabulary or image size of its data."""
    with tempfile.TemporaryDirectory() as folder:
        return with_vocabulary(options, open_examples(options, Path(folder)))
