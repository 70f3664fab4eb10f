"""The feed-forward size that gives a configuration the baseline's size or cost.

--match parameters counts the trained weights. --match flops counts the operations of a
forward pass per token by formula (`models.cost`). Both numbers grow linearly with
model.feedforward, the number of hidden features of the feed-forward. So the numbers at
two sizes give a line, on which the wanted size is found. No other key changes, so
attention stays as the configuration has it.
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
from symjax.models.build import abstract, weights_and_constants
from symjax.programs.comparison.runs import Plan
from symjax.training.preflight import with_vocabulary

KEY = "model.feedforward"
MEASURES = ("parameters", "flops")
UNITS = {"parameters": "parameters", "flops": "FLOPs per token"}
# Multiples to try, the largest first: accelerators are slower at other sizes.
STEPS = (128, 64, 32, 16, 8, 4, 2)
NEAR = 0.01  # largest relative difference from the baseline for a multiple of `STEPS`
FAR = 0.02  # if the difference of every size is larger, the comparison is refused


class Match(NamedTuple):
    """Feed-forward size of a configuration, and how close it comes to the baseline.

    Attributes:
        before: the feed-forward size in the configuration.
        feedforward: the matched size, which replaces it.
        amount: parameters or FLOPs per token with the matched size.
        wanted: parameters or FLOPs per token of the baseline.
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
            f"{self.amount / self.wanted - 1:+.2%} from the baseline's "
            f"{self.wanted:,.0f}"
        )


def match_plan(plan: Plan, baseline: str, measure: str) -> tuple[Plan, list[Match]]:
    """Return the plan with matched feed-forward sizes, and a match per configuration.

    Nothing else of the plan changes. Data are opened, because the number of parameters
    depends on the vocabulary. With --tune, every value is matched, but only the match
    of the first value is returned.

    Args:
        baseline: name of the configuration that the others match.
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
    """Return the feed-forward size with which the model comes close to `wanted`.

    The closest multiple of 128 is tried first, then of 64, 32, …, 2. The first that
    brings the model within 1 % of `wanted` is returned, or else the closest size.

    Args:
        model: the configuration of the model, with the vocabulary of its data.
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
    weights, _ = weights_and_constants(abstract(model))
    parameters = sum(x.size for x in jax.tree.leaves(weights))
    if measure == "parameters":
        return parameters
    return cost.forward_flops(model, parameters)


def _with_feedforward(options: config.Config, size: int) -> config.Config:
    """Return the configuration with `size` hidden features of the feed-forward."""
    model = dataclasses.replace(options.model, feedforward=size)
    return dataclasses.replace(options, model=model)


def _complete(options: config.Config) -> config.Config:
    """Return the configuration with the vocabulary or image size of its data."""
    with tempfile.TemporaryDirectory() as folder:
        return with_vocabulary(options, open_examples(options, Path(folder)))
