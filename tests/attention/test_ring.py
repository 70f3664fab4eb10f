"""Time split over devices: every mechanism is what it is on one, backward too."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from laws import close

from symjax import attention
from symjax.attention import ring
from symjax.attention.decay import Stretch, follow
from symjax.attention.prefix import LinearState, union
from symjax.attention.shards import state_before

B, T, N, K, H, V, M = 2, 24, 4, 2, 3, 5, 6
# Runs inside a stretch, at its border, over several of them, and of single tokens.
SEGMENTS = np.array(
    [[0] * 7 + [1] * 5 + [0] * 12, [4] * 12 + [2, 3] + [1] * 4 + [2] * 6]
)
DEVICES = pytest.mark.parametrize(
    "devices", [4, pytest.param(2, marks=pytest.mark.slow)]
)
TIME = P(None, "sequence")
SPLIT = dict.fromkeys(["query", "key", "value", "segment_ids"], TIME)  # others: whole


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def given(queries=N, keys=K, **more):
    """Query, key and value, large enough that peaks and highest scores move."""
    return {
        "query": 2 * draw(B, T, queries, H),
        "key": 2 * draw(B, T, keys, H, seed=1),
        "value": draw(B, T, K, V, seed=2),
        **more,
    }


def over(devices, function, names, split):
    """A function of arrays by name, time split over devices."""
    mesh = jax.make_mesh(
        (devices,),
        ("sequence",),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[:devices],
    )
    return jax.shard_map(
        lambda arrays: function(**arrays, axis_name="sequence"),
        mesh=mesh,
        in_specs=({name: split.get(name, P()) for name in names},),
        out_specs=TIME,
        check_vma=False,
    )


def results(function, arrays):
    """The output, and the gradient of a random sum of it for every array of floats."""
    floats = {name: x for name, x in arrays.items() if x.dtype.kind == "f"}
    rest = {name: x for name, x in arrays.items() if name not in floats}

    def loss(floats):
        output = function({**floats, **rest})
        return (output * draw(*output.shape, seed=3)).sum(), output

    gradient, output = jax.jit(jax.grad(loss, has_aux=True))(floats)
    return {"output": output, **gradient}


def it_is_what_it_is_alone(devices, function, arrays, split=SPLIT, **options):
    function = partial(function, **options)
    with jax.enable_x64(True):
        wanted = results(lambda arrays: function(**arrays), arrays)
        found = results(over(devices, function, tuple(arrays), split), arrays)
        for name, exact in wanted.items():
            close(found[name], exact, 1e-11)


SEGMENTED = {"segment_ids": SEGMENTS}
BIAS = {"bias": draw(1, N, 1, T, seed=4)}
MASK = {"mask": draw(B, N, 1, T, seed=5) < 0.8}
COUNTED = {"length_base": 16, "mask_self": True}
RING = {"implementation": "ring"}
SCORES = {
    "softmax": (attention.softmax, SEGMENTED | BIAS, COUNTED),
    "sparsemax": (attention.sparsemax, {}, {}),
    "entmax15": (attention.entmax15, MASK, {}),
    "gau": (attention.gau, {}, {"divisor": "count"}),
    "ring": (attention.softmax, BIAS, COUNTED | RING),
    "ring of segments": (attention.softmax, SEGMENTED | MASK, RING),
}


@DEVICES
@pytest.mark.parametrize("name", SCORES)
def test_mechanisms_that_score_pairs(name, devices):
    function, more, options = SCORES[name]
    options = {"is_causal": True, **options}
    it_is_what_it_is_alone(devices, function, given(**more), **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [RING | COUNTED, COUNTED, RING], ids=str)
def test_softmax_over_both_sides(options):
    arrays = given(**(BIAS if options is COUNTED else {}))
    it_is_what_it_is_alone(4, attention.softmax, arrays, **options)


@pytest.mark.parametrize("block", [1, 4])
def test_a_ring_in_blocks_of_rows(block, monkeypatch):
    """Blocks that do not divide a device's six rows, and blocks of one row."""
    monkeypatch.setattr(ring, "BLOCK_ROWS", block)
    options = {"is_causal": True, **COUNTED, **RING}
    it_is_what_it_is_alone(4, attention.softmax, given(**BIAS), **options)


@DEVICES
@pytest.mark.parametrize("options", [{}, RING], ids=["rows", "ring"])
def test_differential_softmax(options, devices):
    options = {"is_causal": True, **options}
    arrays = given(2 * N, 2 * K, lam=draw(N), **BIAS)
    it_is_what_it_is_alone(devices, attention.differential, arrays, **options)
    arrays = given(2 * N, K, lam=draw(B, T, N))
    function, split = attention.differential_v2, {**SPLIT, "lam": TIME}
    it_is_what_it_is_alone(devices, function, arrays, split, **options)


KEYS = {"mask": draw(B, 1, 1, T, seed=6) < 0.7}
PROJECTION = {"projection": draw(M, H, seed=7)}
LINEAR = {
    "linear": (attention.linear_causal, KEYS, {}),
    "taylor": (attention.linear_causal, SEGMENTED, {"features": "taylor"}),
    "cosine": (attention.cosine_causal, SEGMENTED, {}),
    "performer": (attention.performer_causal, PROJECTION, {}),
    "segments": (attention.performer_causal, PROJECTION | SEGMENTED, {}),
    "decay": (attention.decay_causal, {"log_decay": -np.exp(draw(B, T, K, H))}, {}),
    "fixed": (attention.decay_causal, {"log_decay": -np.exp(draw(1, 1, K))}, {}),
    "forgets": (
        attention.decay_causal,
        SEGMENTED | {"log_decay": -np.exp(draw(B, T, K))},
        {},
    ),
}


@DEVICES
@pytest.mark.parametrize("name", LINEAR)
def test_mechanisms_that_have_a_state(name, devices):
    function, more, options = LINEAR[name]
    split = SPLIT | {"mask": P(None, None, None, "sequence")}
    if name != "fixed":
        split["log_decay"] = TIME
    arrays = given(**more)
    it_is_what_it_is_alone(devices, function, arrays, split, chunk_size=4, **options)


def states(devices=4):
    """States of stretches whose peaks differ, one that has seen no key among them."""
    states = [
        LinearState(
            draw(B, K, M, V, seed=seed),
            np.abs(draw(B, K, M, seed=seed + 10)),
            3 * draw(B, K, M, seed=seed + 20),
        )
        for seed in range(devices)
    ]
    empty = LinearState(*(np.zeros(x.shape) for x in states[1][:2]), None)
    states[1] = empty._replace(peak=np.full((B, K, M), -np.inf))
    return states


def test_united_states_are_that_of_all_keys_in_any_grouping():
    one, two, three, four = states()
    with jax.enable_x64(True):
        left = union(union(union(one, two), three), four)
        right = union(one, union(two, union(three, four)))
    peak = np.maximum.reduce([state.peak for state in (one, two, three, four)])
    sums, total = (
        sum(
            part * np.exp(state.peak - peak).reshape((B, K, M) + (1,) * (part.ndim - 3))
            for state in (one, two, three, four)
            for part in [state[index]]
        )
        for index in (0, 1)
    )
    for found in (left, right):
        for part, wanted in zip(found, (sums, total, peak), strict=True):
            close(part, wanted, 1e-14)


def test_stretches_that_follow_each_other_are_one_in_any_grouping():
    """A state read through them fades by the sum of their decays, −∞ forgets it."""
    stretches = [
        Stretch(draw(B, K, H, V, seed=seed), -np.exp(draw(B, K, H, seed=seed + 10)))
        for seed in range(4)
    ]
    stretches[2].log_decay[0, 0, 1] = -np.inf
    with jax.enable_x64(True):
        one, two, three, four = stretches
        left = follow(follow(follow(one, two), three), four)
        right = follow(one, follow(two, follow(three, four)))
    state = np.zeros((B, K, H, V))
    for stretch in stretches:
        state = state * np.exp(stretch.log_decay)[..., None] + stretch.sums
    total = sum(stretch.log_decay for stretch in stretches)
    for found in (left, right):
        close(found.sums, state, 1e-14)
        np.testing.assert_allclose(found.log_decay, total, 1e-14)


@pytest.mark.parametrize("devices", [2, 3, 5, 8])
def test_a_device_gets_the_stretches_before_it_in_order(devices):
    """Words joined: the merge is not commutative, and no device is left out."""

    def join(one, two):  # the digits of a number, and how many
        return one[0] * 10 ** two[1] + two[0], one[1] + two[1]

    mesh = jax.make_mesh(
        (devices,),
        ("sequence",),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[:devices],
    )
    run = jax.shard_map(
        lambda own, empty: state_before(join, own, empty, "sequence"),
        mesh=mesh,
        in_specs=(P("sequence"), P()),
        out_specs=P("sequence"),
        check_vma=False,
    )
    own = np.arange(1, devices + 1), np.ones(devices, int)
    found, count = run(own, (np.zeros(1, int), np.zeros(1, int)))
    assert found.tolist() == [int("0" + "12345678"[:n]) for n in range(devices)]
    assert count.tolist() == list(range(devices))
