"""Time split over devices: outputs and gradients equal those on one device."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from laws import close

from symjax import attention
from symjax.attention.core.sequence import state_before
from symjax.attention.gated_linear import Decayed, DecayState
from symjax.attention.recurrent.linear_state import LinearState, merge
from symjax.attention.scores import rows

B, T, N, K, H, V, M = 2, 24, 4, 2, 3, 5, 6
# Segments in a device, at its border, over several devices, and of single tokens.
SEGMENTS = np.array(
    [[0] * 7 + [1] * 5 + [0] * 12, [4] * 12 + [2, 3] + [1] * 4 + [2] * 6]
)
TIME = P(None, "sequence")
BY_TIME = "query", "key", "value", "log_decay", "segment_ids"
SPLIT = dict.fromkeys(BY_TIME, TIME)  # others: whole


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def given(queries=N, keys=K, **more):
    """Draw query, key and value, large enough that running maxima change."""
    return {
        "query": 2 * draw(B, T, queries, H),
        "key": 2 * draw(B, T, keys, H, seed=1),
        "value": draw(B, T, K, V, seed=2),
        **more,
    }


def over(devices, function, names, split, check_vma=False):
    """Return a function of arrays by name, with time split over devices."""
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
        check_vma=check_vma,
    )


def results(function, arrays):
    """Return the output, and the gradient of a random sum of it for each float
    array."""
    floats = {name: x for name, x in arrays.items() if x.dtype.kind == "f"}
    rest = {name: x for name, x in arrays.items() if name not in floats}

    def loss(floats):
        output = function({**floats, **rest})
        return (output * draw(*output.shape, seed=3)).sum(), output

    gradient, output = jax.jit(jax.grad(loss, has_aux=True))(floats)
    return {"output": output, **gradient}


def it_is_what_it_is_alone(
    devices, function, arrays, split=SPLIT, check_vma=False, **options
):
    function = partial(function, **options)
    with jax.enable_x64(True):
        wanted = results(lambda arrays: function(**arrays), arrays)
        run = over(devices, function, tuple(arrays), split, check_vma)
        found = results(run, arrays)
        for name, exact in wanted.items():
            if exact.any():
                close(found[name], exact, 1e-11)
            else:  # queries and keys of rows that see one key
                assert np.abs(found[name]).max() < 1e-13


SEGMENTED = {"segment_ids": SEGMENTS}
BIAS = {"bias": draw(1, N, 1, T, seed=4)}
MASK = {"mask": draw(B, N, 1, T, seed=5) < 0.8}
COUNTED = {"length_base": 16, "mask_self": True}
RING = {"implementation": "ring"}
CAUSAL = {"is_causal": True}
WINDOW = {"window": (8, 0)}
ALIBI = {"alibi": np.linspace(0.1, 1, N)}
ADJUSTED = {"log_decay": -np.exp(draw(B, T, K, seed=7)), "sink": draw(N, seed=8)}
SCORES = {
    "softmax": (attention.softmax, SEGMENTED | BIAS, CAUSAL | COUNTED),
    "sparsemax": (attention.sparsemax, {}, CAUSAL),
    "ring": (attention.softmax, SEGMENTED | MASK, CAUSAL | RING),
    "entmax15": (attention.entmax15, MASK, CAUSAL),
    "gau": (attention.gau, {}, CAUSAL | {"divisor": "count"}),
    "window": (attention.softmax, SEGMENTED | MASK, CAUSAL | WINDOW),
    "window of both sides": (attention.sparsemax, {}, {"window": (2, 7)}),
    "ring in a window": (attention.softmax, ALIBI, CAUSAL | COUNTED | WINDOW | RING),
    "ring in its own": (attention.softmax, {}, COUNTED | {"window": (0, 0)} | RING),
    "ring in segments": (attention.softmax, SEGMENTED, {"window": (9, 3)} | RING),
    "both sides": (attention.softmax, BIAS, COUNTED),
    "ring of both sides": (attention.softmax, {}, COUNTED | RING),
    "gates": (attention.entmax15, SEGMENTED | MASK | ADJUSTED, CAUSAL | COUNTED),
    "gates on both sides": (attention.softmax, ADJUSTED, WINDOW),
    "ring by distance": (attention.softmax, {}, RING | {"length_scale": "distance"}),
    "ring of gates": (attention.softmax, SEGMENTED | MASK | ADJUSTED, CAUSAL | RING),
    "ring of gates on both sides": (attention.softmax, ADJUSTED, COUNTED | RING),
}


def some(names, default):
    """Return each name over 4 and over 2 devices; those that are not default are
    slow."""
    return [
        pytest.param(
            name, n, marks=() if name in default and n == 4 else pytest.mark.slow
        )
        for n in (4, 2)
        for name in names
    ]


QUICK = "softmax", "sparsemax", "ring", "window", "ring in a window"


@pytest.mark.parametrize(
    ("name", "devices"),
    some(SCORES, [*QUICK, "gates", "ring of gates"]),
)
def test_mechanisms_that_score_pairs(name, devices):
    function, more, options = SCORES[name]
    it_is_what_it_is_alone(devices, function, given(**more), **options)


def test_a_ring_in_blocks_of_rows(monkeypatch):
    """Blocks of three of the eight rows of a device, with log-n scaling and a bias."""
    monkeypatch.setattr(rows, "BLOCK_ROWS", 3)
    options = CAUSAL | COUNTED | RING
    it_is_what_it_is_alone(3, attention.softmax, given(**BIAS), **options)


@pytest.mark.parametrize("name", ["ring", "ring in a window", "ring of both sides"])
def test_shard_map_counts_the_axes_that_a_ring_varies_over(name):
    """With the default `check_vma`; replicated arrays have one gradient."""
    function, more, options = SCORES[name]
    arrays = given(**more)
    it_is_what_it_is_alone(4, function, arrays, check_vma=True, **options)


def test_a_ring_has_no_forward_derivative_and_says_so():
    arrays = given()
    names = tuple(arrays)
    run = over(4, partial(attention.softmax, **CAUSAL, **RING), names, SPLIT)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(run, (arrays,), (arrays,))


@pytest.mark.parametrize("options", [{}, RING], ids=["rows", "ring"])
def test_a_mean_of_values_does_not_blur_gradients_in_bfloat16(options):
    """The mean cancels in gradients of scores; they were off by 2.4 times as much."""
    query, key, value, weigh = (draw(1, 300, 2, 8, seed=seed) for seed in range(4))
    arrays = {"query": query, "key": key, "value": 4 + value}
    run = over(2, partial(attention.softmax, **options), tuple(arrays), SPLIT)
    gradient = jax.jit(jax.grad(lambda arrays: (run(arrays) * weigh).sum()))

    rounded = {name: jnp.asarray(x, jnp.bfloat16) for name, x in arrays.items()}
    wanted = gradient({name: x.astype(jnp.float32) for name, x in rounded.items()})
    for name, found in gradient(rounded).items():
        error = np.linalg.norm(np.float64(found) - wanted[name])
        assert error < 2**-8 * np.linalg.norm(wanted[name]), name


LAMBDA = {"lam": TIME}
BRANCHES = {"log_decay": -np.exp(draw(B, T, 2 * K, seed=7)), "sink": draw(N, seed=8)}
GROUPED = partial(attention.differential, signals=2)
DIFFERENTIAL = {
    "v1": (attention.differential, given(2 * N, 2 * K, lam=draw(N), **BIAS), {}),
    "v1 ring": (attention.differential, given(2 * N, 2 * K, lam=draw(N), **BIAS), RING),
    "v1 gates": (
        attention.differential,
        given(2 * N, 2 * K, lam=draw(N), **BRANCHES),
        RING,
    ),
    "grouped": (GROUPED, given(3 * N, 2 * K, lam=draw(2 * N), **BIAS), {}),
    "grouped ring": (GROUPED, given(3 * N, 2 * K, lam=draw(2 * N), **BRANCHES), RING),
    "v2": (attention.differential_v2, given(2 * N, K, lam=draw(B, T, N)), {}),
    "v2 ring": (attention.differential_v2, given(2 * N, K, lam=draw(B, T, N)), RING),
}


@pytest.mark.parametrize(
    ("name", "devices"), some(DIFFERENTIAL, ["v1", "v1 ring", "v2 ring"])
)
def test_differential_softmax(name, devices):
    function, arrays, options = DIFFERENTIAL[name]
    split = SPLIT | (LAMBDA if name.startswith("v2") else {})
    it_is_what_it_is_alone(devices, function, arrays, split, **CAUSAL, **options)


KEYS = {"mask": draw(B, 1, 1, T, seed=6) < 0.7}
PROJECTION = {"projection": draw(M, H, seed=7)}
MORE = {"linear_query": draw(B, T, N, M), "linear_key": draw(B, T, K, M, seed=8)}
DECAY = {"log_decay": -np.exp(draw(B, T, K))}
LINEAR = {
    "linear": (attention.linear_causal, KEYS, {}),
    "performer": (attention.performer_causal, PROJECTION | SEGMENTED | KEYS, {}),
    "decay": (attention.decay_causal, SEGMENTED | DECAY, {}),
    "flash": (attention.flash_causal, SEGMENTED | MORE, {"group_size": 3}),
    "taylor": (attention.linear_causal, SEGMENTED, {"features": "taylor"}),
    "cosine": (attention.cosine_causal, SEGMENTED, {}),
    "one run": (attention.performer_causal, PROJECTION, {}),
    "gated": (attention.decay_causal, {"log_decay": -np.exp(draw(B, T, K, H))}, {}),
    "fixed": (attention.decay_causal, {"log_decay": -np.exp(draw(1, 1, K))}, {}),
}


@pytest.mark.parametrize(
    ("name", "devices"), some(LINEAR, ["linear", "performer", "decay", "flash"])
)
def test_mechanisms_that_have_a_state(name, devices):
    function, more, options = LINEAR[name]
    places = {"mask": P(None, None, None, "sequence"), "log_decay": TIME}
    split = SPLIT | places | dict.fromkeys(MORE, TIME)
    if name == "fixed":
        split["log_decay"] = P()
    options = options if name == "flash" else {"chunk_size": 4, **options}
    it_is_what_it_is_alone(devices, function, given(**more), split, **options)


REFUSED = {
    "a bias must be the same for all rows, broadcast to (2, 4, 1, 96)": (
        attention.softmax,
        {"bias": draw(1, N, T, 4 * T)},
        RING,
    ),
    "with segment_ids cannot count the keys that a row sees, as mask_self True": (
        attention.softmax,
        SEGMENTED,
        RING | {"mask_self": True},
    ),
    "with a mask cannot count the keys that a row sees, as length_base 16": (
        attention.softmax,
        {"mask": np.ones((1, 1, 1, 4 * T), bool)},
        RING | {"length_base": 16},
    ),
    "'ring' is unknown: choose from rows, whole": (attention.sparsemax, {}, RING),
    "return_state has no meaning with axis_name 'sequence'": (
        attention.cosine_causal,
        {},
        {"return_state": True},
    ),
    "positions have no meaning with axis_name 'sequence'": (
        attention.softmax,
        {"positions": np.arange(T)[None]},
        CAUSAL,
    ),
    "needs as many keys as queries, got query (2, 24, 4, 3) and key (2, 23, 2, 3)": (
        attention.softmax,
        {"key": draw(B, T - 1, K, H), "value": draw(B, T - 1, K, V)},
        {},
    ),
    "a device's 24 tokens, query (2, 24, 4, 3), are not a multiple of group_size 5": (
        attention.flash_causal,
        MORE,
        {"group_size": 5},
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_split_is_refused_by_name(words):
    function, more, options = REFUSED[words]
    arrays = given(**more)
    run = over(4, partial(function, **options), tuple(arrays), {})
    with pytest.raises(ValueError, match=re.escape(words)):
        jax.eval_shape(run, arrays)


def states(devices=4):
    """Return states with different maxima, one of which has seen no key."""
    states = [
        LinearState(
            draw(B, K, M, V, seed=seed),
            np.abs(draw(B, K, M, seed=seed + 10)),
            3 * draw(B, K, M, seed=seed + 20),
        )
        for seed in range(devices)
    ]
    empty = LinearState(*(np.zeros(x.shape) for x in states[1][:2]), None)
    states[1] = empty._replace(running_max=np.full((B, K, M), -np.inf))
    return states


def test_merged_states_are_that_of_all_keys_in_any_grouping():
    one, two, three, four = states()
    with jax.enable_x64(True):
        left = merge(merge(merge(one, two), three), four)
        right = merge(one, merge(two, merge(three, four)))
    peak = np.maximum.reduce([state.running_max for state in (one, two, three, four)])
    sums, total = (
        sum(
            part
            * np.exp(state.running_max - peak).reshape(
                (B, K, M) + (1,) * (part.ndim - 3)
            )
            for state in (one, two, three, four)
            for part in [state[index]]
        )
        for index in (0, 1)
    )
    for found in (left, right):
        for part, wanted in zip(found, (sums, total, peak), strict=True):
            close(part, wanted, 1e-14)


def test_stretches_that_follow_each_other_are_one_in_any_grouping():
    """A state decays by the sum of the log-decays; −∞ resets it."""
    stretches = [
        (
            DecayState(draw(B, K, H, V, seed=seed)),
            -np.exp(draw(B, K, H, seed=seed + 10)),
        )
        for seed in range(4)
    ]
    stretches[2][1][0, 0, 1] = -np.inf
    merge = Decayed().merge
    with jax.enable_x64(True):
        one, two, three, four = stretches
        left = merge(merge(merge(one, two), three), four)
        right = merge(one, merge(two, merge(three, four)))
    sums = np.zeros((B, K, H, V))
    for own, log_decay in stretches:
        sums = sums * np.exp(log_decay)[..., None] + own.sums
    total = sum(log_decay for _, log_decay in stretches)
    for found, log_decay in (left, right):
        close(found.sums, sums, 1e-14)
        np.testing.assert_allclose(log_decay, total, 1e-14)


@pytest.mark.parametrize("devices", [2, 3, 5, 8])
def test_a_device_gets_the_stretches_before_it_in_order(devices):
    """The merge joins words: it is not commutative, and no device is left out."""

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


@pytest.mark.slow
def test_a_ring_holds_less_than_what_would_be_gathered():
    """The gradient over 8 devices; memory of both forms is linear in time."""
    names = "query", "key", "value"
    split = dict.fromkeys(names, TIME)

    def memory(options, length):
        graded = over(8, partial(attention.softmax, **CAUSAL, **options), names, split)
        shapes = dict.fromkeys(names, jax.ShapeDtypeStruct((1, length, 2, 64), "f4"))
        loss = jax.jit(jax.grad(lambda arrays: graded(arrays).sum()))
        return loss.lower(shapes).compile().memory_analysis().temp_size_in_bytes

    short, long = (memory(RING, length) for length in (2048, 4096))
    assert long < 2.2 * short
    assert long < 0.4 * memory({}, 4096)
