"""Headline numbers of tasks: one for each task, read from results made by hand."""

import pytest

from symjax.evaluation import tasks
from symjax.evaluation.headlines import HEADLINES, headlines
from symjax.evaluation.results import Result, Table, not_applicable

TABLE = (Table("t", (), ()),)
CASES = {
    "loss": ({"heldout": {"perplexity": 3.0}}, {"perplexity": 3.0}),
    "lambda": ({"lambda": [{"lambda": 0.25}, {"lambda": 0.75}]}, {"λ": 0.5}),
    "mqar": (
        {"mqar": [{"accuracy": 1.0}, {"accuracy": 0.5}]},
        {"mqar accuracy": 0.75, "mqar accuracy, last row": 0.5},
    ),
    "needle": (
        {"needle": {"grid": [[1.0, 0.5], [0.25, 0.25]]}},
        {"needle accuracy": 0.5},
    ),
    "order": (
        {"order": {"together": {"mean": 0.5}, "changed": 0.25}},
        {"accuracy over orders": 0.5, "answers changed by order": 0.25},
    ),
    "length": (
        {
            "length": {
                "32": {"off": {"loss": 1.0}, "trained": {"loss": 2.0}},
                "64": {"off": {"loss": 3.0}, "evaluation": {"loss": 4.0}},
            }
        },
        {"loss at 32 tokens": 2.0, "loss at 64 tokens": 3.0},
    ),
    "position": (
        {"position": [{"loss": 3.0}, {"from": 17, "to": 32, "loss": 1.0}]},
        {"loss at places 17 to 32": 1.0},
    ),
    "noise": (
        {
            "noise": [
                {"map": "A", "answer": 0.5, "context": 0.25},
                {"map": "A₁", "answer": 0.0, "context": 0.0},
                {"map": "A", "answer": None, "context": 0.75},
            ]
        },
        {"share on the answer": 0.5, "share on the context": 0.5},
    ),
    "self_share": (
        {"self_share": [{"mean": 0.5}, {"mean": 0.25}]},
        {"share on itself": 0.375},
    ),
    "dilution": (
        {"dilution": [{"within": {"1": 0.0, "16": 0.5}}]},
        {"share on the last 16": 0.5},
    ),
    "entropy": (
        {
            "entropy": [
                {"entropy": {"1": 0.0, "8": 2.0}, "slope": None},
                {"entropy": {"1": 0.0, "8": 1.0}, "slope": None},
            ]
        },
        {"entropy slope": None, "entropy of the last row": 1.5},
    ),
    "support": (
        {
            "support": [{"share": 0.5}, {"share": 0.25}],
            "sparsity": [
                {"map": "A", "top_16": 0.5, "hoyer": 0.25},
                {"map": "A₁", "top_16": 0.0, "hoyer": 0.0},
                {"map": "A", "top_16": 1.0, "hoyer": 0.75},
            ],
        },
        {
            "share of keys with a weight": 0.375,
            "share on the 16 largest": 0.75,
            "Hoyer sparsity": 0.5,
        },
    ),
    "rank": (
        {
            "rank": [
                {"layer": 0, "effective": 9.0},
                {"layer": 0, "effective": 2.0},
                {"layer": 1, "effective": 4.0},
            ]
        },
        {"effective rank of the map": 3.0},
    ),
    "sets": (
        {"sets": [{}, {"samples": 64, "as drawn": 0.5, "in order": 0.25}]},
        {"majority of 64 as drawn": 0.5, "majority of 64 in order": 0.25},
    ),
    "reverse": (
        {"reverse": [{"accuracy": 0.0}, {"accuracy": 0.25}]},
        {"reverse accuracy": 0.125, "reverse accuracy, last row": 0.25},
    ),
    "spectrum": (
        {
            "spectrum": {
                "matrices": [
                    {"matrix": "QKᵀ", "ratio": 9.0},
                    {"matrix": "A", "ratio": 2.0},
                    {"matrix": "A₁ − λA₂", "ratio": 4.0},
                ],
                "tokens": [{}, {"cosine": 0.5, "stable_rank": 2.0}],
                "chains": [{"balance_error": 0.5}, {"balance_error": 0.25}],
            }
        },
        {
            "σ₁/σ₂ of the map": 3.0,
            "cosine of tokens, last layer": 0.5,
            "stable rank of tokens, last layer": 2.0,
            "error of detailed balance": 0.375,
        },
    ),
    "symmetry": (
        {"symmetry": [{"symmetry": 1.0, "direction": 0.5}]},
        {"symmetry of W_q W_kᵀ": 1.0, "direction of W_q W_kᵀ": 0.5},
    ),
    "outliers": (
        {"outliers": {"logit": [], "hidden": [{"top_1": 1.0}, {"top_1": 5.0}]}},
        {"largest |score|": None, "largest |hidden|": 5.0},
    ),
    "approximation": (
        {
            "approximation": {
                "own": [{"map": 0.5, "output": 0.25}],
                "random": [{"output": 0.75}, {"output": 0.125}],
            }
        },
        {
            "error of own map": 0.5,
            "error of own output": 0.25,
            "least error of output, random features": 0.125,
        },
    ),
    "gradients": (
        {
            "gradients": [{"largest": 0.25}, {"largest": 7.0}],
            "branches": [{"cosine": -0.5}, {"cosine": 0.25}, {"cosine": None}],
        },
        {"largest |∂a/∂z|": 7.0, "cosine of g₁ and g₂": -0.125},
    ),
    "dimension": (
        {"dimension": {"head_sizes": [16, 64], "needed": 32.0}},
        {"head size ÷ 8 ln n": 0.5},
    ),
}


def test_every_task_says_its_headlines():
    assert HEADLINES.keys() == tasks.TASKS.keys()


@pytest.mark.parametrize("name", CASES)
def test_headlines_are_means_over_layers(name):
    values, wanted = CASES[name]
    assert headlines(name, Result(values, [], TABLE)) == pytest.approx(wanted)


def test_speed_is_that_of_the_longest_row():
    columns = ("work", "tokens", "tokens/s", "÷ softmax", "MiB", "MiB ÷ softmax")
    works = [("prefill", 128, 9.0, 3.0), ("prefill", 256, 9.0, 2.0)]
    rows = [(*row, 1.0, 1.0) for row in (*works, ("decoding", 256, 9.0, 1.0))]
    result = Result({}, [], (Table("speed", columns, rows),))
    found = headlines("speed", result)
    assert found == {"prefill ÷ softmax": 2.0, "decoding ÷ softmax": 1.0}


@pytest.mark.parametrize("name", HEADLINES)
def test_a_task_that_does_not_apply_has_none(name):
    assert headlines(name, not_applicable(name, "a reason")) == {}
