"""The learning rate of each step, and the message if other steps change it."""

import dataclasses

import numpy as np
import optax
import pytest

from symjax import config
from symjax.training.schedule import schedule, schedule_change

SCHEDULES = (
    "constant_schedule",
    "cosine_decay_schedule",
    "linear_schedule",
    "warmup_constant_schedule",
    "warmup_cosine_decay_schedule",
    "wsd",
)


def options(**changes) -> config.Optimizer:
    constant = {"schedule": "constant_schedule", "learning_rate": 0.1}
    return dataclasses.replace(config.Optimizer(), **(constant | changes))


def test_the_schedules_tested_here_are_those_of_the_configuration():
    [field] = [x for x in dataclasses.fields(config.Optimizer) if x.name == "schedule"]
    assert set(field.metadata["choices"]) == set(SCHEDULES)


FALLING = set(SCHEDULES) - {"constant_schedule", "warmup_constant_schedule"}


def rates(steps, count, **changes):
    """Return the rates of the first `count` steps."""
    rate = schedule(options(**changes), steps)
    return np.array([rate(taken) for taken in range(count)])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_the_first_step_moves_and_the_last_step_has_the_rate_of_the_end(name, warmup):
    """20 steps; step n of a warm-up of w steps has n/w of the peak."""
    found = rates(20, 31, schedule=name, warmup=warmup, final=0.2)
    rising = warmup if name.startswith("warmup") or name == "wsd" else 0
    np.testing.assert_allclose(
        found[:rising], 0.1 * np.arange(1, rising + 1) / max(rising, 1), rtol=1e-6
    )
    np.testing.assert_allclose(found[max(rising, 1) - 1], 0.1, rtol=1e-6)
    assert (np.diff(found[max(rising, 1) - 1 :]) <= 0).all()
    np.testing.assert_allclose(found[19:], 0.02 if name in FALLING else 0.1, rtol=1e-5)
    if name in FALLING:
        assert found[18] > 0.0201


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_of_one_step_takes_it_at_the_peak(name):
    found = rates(1, 3, schedule=name, warmup=0, cooldown=0, final=0.2)
    after = 0.02 if name in FALLING else 0.1
    np.testing.assert_allclose(found, [0.1, after, after], rtol=1e-6)


def test_without_a_cooldown_the_end_follows_the_last_step_and_is_held():
    given = {"schedule": "wsd", "warmup": 2, "cooldown": 0, "final": 0.2}
    found = rates(100, 30, decay_steps=10, **given)
    np.testing.assert_allclose(found, [0.05] + [0.1] * 9 + [0.02] * 20, rtol=1e-6)
    np.testing.assert_allclose(rates(10, 10, **given)[1:], 0.1, rtol=1e-6)
    one = rates(10, 12, **{**given, "cooldown": 1})
    np.testing.assert_allclose(one[7:], [0.1, 0.1, 0.02, 0.02, 0.02], rtol=1e-6)


FORMER = {
    "constant_schedule": lambda peak, end, warmup: optax.constant_schedule(peak),
    "cosine_decay_schedule": lambda peak, end, warmup: optax.cosine_decay_schedule(
        peak, 20, end / peak
    ),
    "linear_schedule": lambda peak, end, warmup: optax.linear_schedule(peak, end, 20),
    "warmup_constant_schedule": lambda peak, end, warmup: (
        optax.warmup_constant_schedule(0.0, peak, warmup)
        if warmup
        else optax.constant_schedule(peak)
    ),
    "warmup_cosine_decay_schedule": lambda peak, end, warmup: (
        optax.warmup_cosine_decay_schedule(0.0, peak, warmup, 20, end)
    ),
    "wsd": lambda peak, end, warmup: optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, end, 5),
        ],
        [warmup, 15],
    ),
}


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_an_older_run_keeps_the_rates_that_it_began_with(name, warmup):
    """The rates before optimizer.version existed, also without a cool-down."""
    given = {"schedule": name, "warmup": warmup, "final": 0.2, "cooldown": 0.25}
    found = rates(20, 31, version=1, **given)
    former = FORMER[name](0.1, 0.02, warmup)
    wanted = np.array([former(taken) for taken in range(31)], np.float32)
    np.testing.assert_array_equal(found, wanted)
    if name == "wsd":
        found = rates(20, 31, version=1, **{**given, "cooldown": 0})
        np.testing.assert_allclose(found[warmup:], 0.1, rtol=1e-6)


def test_more_steps_change_no_rate_before_the_decay():
    chosen = options(schedule="wsd", warmup=3, cooldown=0.25, final=0.0)
    short, long = (schedule(chosen, steps) for steps in (40, 200))
    both = np.array([[rate(step) for rate in (short, long)] for step in range(200)])
    np.testing.assert_array_equal(both[:30, 0], both[:30, 1])
    np.testing.assert_allclose(both[2:30], 0.1, rtol=1e-6)
    np.testing.assert_allclose(both[29:40, 0], np.linspace(0.1, 0, 11), atol=1e-8)
    np.testing.assert_allclose(both[29:150, 1], 0.1, rtol=1e-6)


def test_a_change_of_the_steps_is_said_where_it_changes_the_rate():
    def line(before, after, taken, then="", **changes):
        changes = {"learning_rate": 0.1, "warmup": 0} | changes
        chosen = dataclasses.replace(config.Optimizer(), **changes)
        saved, now = (config.Config(steps=n, optimizer=chosen) for n in (before, after))
        if then:  # another schedule from here on, which --allow permits
            chosen = dataclasses.replace(chosen, schedule=then)
            now = dataclasses.replace(now, optimizer=chosen)
        return schedule_change(saved, now, taken)

    linear = {"schedule": "linear_schedule", "final": 0.1}
    assert line(60, 300, 60, **linear) == (
        "learning rate of step 61: 0.0819 with steps 300, was 0.01 with steps 60 "
        "(optimizer.schedule=wsd can be extended)"
    )
    assert line(200, 100, 50, **linear).startswith(
        "learning rate of step 100: 0.01 with steps 100, was 0.0552 with steps 200"
    )
    warmed = {"schedule": "warmup_cosine_decay_schedule", "warmup": 20}
    for taken in (1, 10, 20):  # both warm-ups have equal rates
        assert "step 60: " in line(60, 300, taken, **warmed)
    assert line(60, 300, 30, **linear, decay_steps=60) is None
    assert line(60, 300, 30, schedule="constant_schedule") is None
    assert line(60, 300, 60, then="wsd", **linear) == (
        "learning rate of step 61: 0.1 with steps 300, was 0.01 with steps 60"
    )
    assert line(60, 300, 48, schedule="wsd") is None
    shorter = config.Optimizer(schedule="wsd", warmup=0, cooldown=0.1)
    saved = dataclasses.replace(shorter, cooldown=0.5)
    known = (
        config.Config(steps=n, optimizer=x) for n, x in ((60, saved), (300, shorter))
    )
    assert "the rate has decayed since step 30" in schedule_change(*known, 50)
    assert line(60, 300, 60, schedule="wsd").endswith(
        "0.1 with steps 300, was 0.01 with steps 60 (the rate has decayed since step "
        "48: if a checkpoint up to then is kept, remove the newer ones to continue "
        "without this jump)"
    )
    assert line(60, 300, 48, schedule="wsd") is None
    assert "step 100: 0.01 with steps 100, was 0.1" in line(
        300, 100, 50, schedule="wsd"
    )


def test_decay_steps_take_the_place_of_the_steps_of_the_run():
    decayed = options(schedule="linear_schedule", final=0.0, decay_steps=10)
    rate = schedule(decayed, 1000)
    np.testing.assert_allclose(rate(3), 0.1 * 6 / 9, rtol=1e-6)
    np.testing.assert_allclose([rate(9), rate(500)], 0.0, atol=1e-8)
