"""Interleaved times of one model with different attention."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from symjax import config
from symjax.evaluation.measures import speed
from symjax.evaluation.results import Options
from symjax.models import Decoder

MODEL = config.Model(
    vocabulary=11,
    width=16,
    depth=1,
    heads=2,
    positions="rope",
    attention=config.Attention(mechanism="linear", differential="v1"),
)


def test_jobs_take_turns_and_the_first_round_does_not_count(monkeypatch):
    clock, calls = [0.0], []
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])

    def job(name, cost):
        def run():
            first = name not in calls
            calls.append(name)
            clock[0] += 100 if first else cost

        return run

    seconds = speed.time_in_turns(job("a", 2), job("b", 6))
    assert calls == ["a", "b"] * (speed.ROUNDS + 1)
    np.testing.assert_array_equal(seconds, [[2] * speed.ROUNDS, [6] * speed.ROUNDS])


def test_the_measure_is_the_same_model_with_plain_softmax():
    other = speed.with_softmax(speed.with_length(MODEL, 64))
    assert other.attention == config.Attention() and other.length == 64
    assert (other.width, other.depth, other.heads) == (16, 1, 2)


def test_memory_holds_the_weights_and_what_is_read():
    options = config.Config(model=MODEL)
    job = speed.prefill(options, 32)
    weights = nnx.state(Decoder(MODEL, rngs=nnx.Rngs(0)), nnx.Param)
    size = sum(x.nbytes for x in jax.tree.leaves(weights))
    assert job.tokens == 32 and job.run().shape == (1, 32, 11)
    assert size / speed.MIB <= job.memory < 2


@pytest.mark.slow
def test_speeds_are_ratios_of_the_same_run_and_stay_out_of_the_json(monkeypatch):
    monkeypatch.setattr(speed, "LENGTHS", (32,))
    monkeypatch.setattr(speed, "ROUNDS", 2)

    run = SimpleNamespace(config=config.Config(model=MODEL))

    finding = speed.speed(run, Options())
    assert finding.values == {}
    table, crossovers = finding.tables
    assert [row[0] for row in crossovers.rows] == ["prefill", "training", "decoding"]
    assert [row[:2] for row in table.rows] == [
        ("prefill", 32),
        ("training", 32),
        ("decoding", 32),
    ]
    assert all(x > 0 for row in table.rows for x in row[2:])
    assert list(finding.figures[0].series) == ["prefill", "training", "decoding"]


def test_the_crossover_is_where_the_ratio_grows_beyond_one():
    lengths = (128, 512, 1024, 4096)
    ratios = [(length / 700) ** 0.6 for length in lengths]
    assert speed.crossover(lengths, ratios) == "700"
    assert speed.crossover(lengths, [1.1, 0.9, 0.8, 0.7]) == "> 4096"
    assert speed.crossover(lengths, [1.0, 1.2, 1.1, 1.3]) == "≤ 128"
    # faster at 128 by chance: what counts is that all longer rows are faster
    assert speed.crossover(lengths, [1.2, 0.5, 2, 4]) == f"{512 * 2**0.5:.0f}"
    assert speed.crossover(lengths, [1.2, 0.5, 1, 1.5]) == "1024"


def test_the_given_lengths_are_all_measured(monkeypatch):
    def compare(options, length):
        cells = [("prefill", length, 1.0, length / 8192, 1.0, 1.0)]
        return [*cells, ("training", length, 1.0, 0.5, 1.0, 1.0)]

    monkeypatch.setattr(speed, "compare_with_softmax", compare)
    monkeypatch.setattr(speed, "PATIENCE", -1.0)
    run = SimpleNamespace(config=config.Config(model=MODEL))
    lengths = (512, 4096, 16384)
    measured, crossovers = speed.speed(run, Options(lengths=lengths)).tables
    assert [row[1] for row in measured.rows[::2]] == list(lengths)
    assert crossovers.rows == [("prefill", "8192"), ("training", "> 16384")]
    hurried = speed.speed(run, Options())
    assert len(hurried.tables[0].rows) == 2 and "these took" in hurried.text[-1]
    plain = SimpleNamespace(config=config.Config(model=speed.with_softmax(MODEL)))
    assert len(speed.speed(plain, Options(lengths=lengths)).tables) == 1


def test_what_does_not_fit_into_memory_is_said(monkeypatch):
    def refuse(*_):
        raise ValueError("a training step takes 9 GiB a device, there are 1")

    run = SimpleNamespace(config=config.Config(model=MODEL))

    monkeypatch.setattr(speed, "compare_with_softmax", refuse)
    finding = speed.speed(run, Options())
    assert "128 tokens and more left out: a training step takes" in finding.text[1]
    assert finding.tables[0].rows == [] and finding.figures == ()


@pytest.mark.parametrize("pattern", [(), ("gau", "softmax")])
def test_a_pattern_becomes_softmax_everywhere(pattern):
    model = config.Model(depth=2, pattern=pattern)
    assert speed.mechanisms(speed.with_softmax(model)) == ["softmax", "softmax"]
