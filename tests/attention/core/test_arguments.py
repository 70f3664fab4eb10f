"""Arguments that no mechanism takes raise one line with the function and argument."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from symjax import attention as A

B, T, N, H = 2, 5, 3, 4
X = np.ones((B, T, N, H), np.float32)
TWO = np.ones(2, np.float32)
IDS = np.ones((B, T), np.float32)
COMPLEX = jax.tree.map(
    lambda x: x.astype(np.complex64), A.linear_state(B, N, H, H, features="relu")
)
WRONG = {
    "softmax: query must be an array of floating numbers, got a list": lambda: (
        A.softmax(X.tolist(), X, X)
    ),
    "linear: value must be an array of floating numbers, got None": lambda: A.linear(
        X, X, None
    ),
    f"cosine: .* heads not 0, got {(B, T, 0, H)}": lambda: A.cosine(X[:, :, :0], X, X),
    f"linear: .* size above 0, got query {(B, T, N, 0)} and key": lambda: A.linear(
        X[..., :0], X[..., :0], X
    ),
    "softmax: scale must be one number, got 'a'": lambda: A.softmax(X, X, X, scale="a"),
    "performer: scale must be one number, got (2,)": lambda: A.performer(
        X, X, X, scale=TWO
    ),
    "flash: scale must be finite, got nan": lambda: A.flash(
        X, X, X, X, X, scale=float("nan")
    ),
    "softmax: scale must be finite, got inf": lambda: A.softmax(
        X, X, X, scale=float("inf")
    ),
    "flash: scale must be one number, got (2,)": lambda: A.flash(
        X, X, X, X, X, scale=TWO
    ),
    "matrix_function: scale must be one number, got (2,)": lambda: A.matrix_function(
        X, X, "exp", scale=TWO
    ),
    "matrix_function: alpha must be one number, got (2,)": lambda: A.matrix_function(
        X, X, "resolvent", alpha=TWO
    ),
    "matrix_function: function must be an array, got None": lambda: A.matrix_function(
        X, X, None
    ),
    "softmax: length_base must be above 1 and finite, got nan": lambda: A.softmax(
        X, X, X, length_base=float("nan")
    ),
    "softmax: is_causal must be True or False, got 1": lambda: A.softmax(
        X, X, X, is_causal=1
    ),
    "softmax: mask must be a boolean array (True = attend), got float32": lambda: (
        A.softmax(X, X, X, mask=np.ones((1, 1, T, T), np.float32))
    ),
    "softmax: bias must be an array of real numbers, got bool": lambda: A.softmax(
        X, X, X, bias=np.ones((1, 1, T, T), bool)
    ),
    "softmax: positions must be an array of whole numbers, got float32": lambda: (
        A.softmax(X, X, X, positions=IDS)
    ),
    "softmax: segment_ids must be an array of whole numbers, got float32": lambda: (
        A.softmax(X, X, X, segment_ids=IDS)
    ),
    "linear: segment_ids must be an array of whole numbers, got float32": lambda: (
        A.linear(X, X, X, segment_ids=IDS)
    ),
    "linear: mask must be a boolean array (True = attend), got a list": lambda: (
        A.linear(X, X, X, mask=[[True]])
    ),
    "linear: features ['elu'] is unknown": lambda: A.linear(X, X, X, features=["elu"]),
    "linear_causal: chunk_size must be an int, got True": lambda: A.linear_causal(
        X, X, X, chunk_size=True
    ),
    "decay_causal: log_decay must be an array, got None": lambda: A.decay_causal(
        X, X, X, None
    ),
    "decay_causal: key must be [batch, time, heads, size]": lambda: A.decay_causal(
        X[0], X[0], X[0], TWO
    ),
    "delta_causal: beta must be an array, got None": lambda: A.delta_causal(
        X, X, X, None
    ),
    "delta_causal: key must be [batch, time, heads, size]": lambda: A.delta_causal(
        X[0], X[0], X[0], TWO
    ),
    "linear_step: a step needs the state before its token, got None": lambda: (
        A.linear_step(None, *[X[:, :1]] * 3)
    ),
    "differential: attend must be a function, got 'softmax'": lambda: A.differential(
        X, X, X, 0.5, attend="softmax"
    ),
    "symmetric: attend must be a function, got 'softmax'": lambda: A.symmetric(
        X, X, attend="softmax"
    ),
    "decay_causal: log_decay must be an array of real numbers, got bool": lambda: (
        A.decay_causal(X, X, X, np.ones(N, bool))
    ),
    "delta_causal: beta must be an array of real numbers, got complex64": lambda: (
        A.delta_causal(X, X, X, np.ones((B, T, N), np.complex64))
    ),
    "linear_causal: return_state must be True or False, got 'no'": lambda: (
        A.linear_causal(X, X, X, return_state="no")
    ),
    "performer: projection must be [M H] for query": lambda: A.performer(
        X, X, X, np.ones((0, H), np.float32)
    ),
    "performer: statistics must be those of favor_statistics, got 3": lambda: (
        A.performer(X, X, X, features="favor#", statistics=3)
    ),
    "linear_step: the state's sums must be an array of floating numbers, got": (
        lambda: A.linear_step(COMPLEX, *[X[:, :1]] * 3)
    ),
    "flash_step: the state's place must be an array of whole numbers, got float32": (
        lambda: A.flash_step(
            A.flash_state(B, N, H, H, group_size=3)._replace(place=TWO),
            *[X[:, :1]] * 5,
        )
    ),
    "cosine_state: head_size must be at least 1, got -4": lambda: A.cosine_state(
        B, N, -H, H
    ),
    "decay_state: dtype must be a floating-point type, got None": lambda: A.decay_state(
        B, N, H, H, dtype=None
    ),
    "flash_state: dtype must be a floating-point type, got 'x'": lambda: A.flash_state(
        B, N, H, H, dtype="x"
    ),
    "linear: key must be an array of floating numbers, got None": lambda: A.linear(
        X, None, X, np.ones((B, 1, 1, T), bool), features=lambda x: x
    ),
    "linear: features must map .* got a list": lambda: A.linear(
        X, X, X, features=lambda x: [x]
    ),
    "retention_log_decay: heads must be an int, got Array(4": lambda: (
        A.retention_log_decay(jnp.asarray(4))
    ),
    "performer_state: dtype must be a floating-point type, got": lambda: (
        A.performer_state(B, N, H, H, dtype=jnp.int32)
    ),
    "performer: scale must be an array of real numbers, got bool": lambda: A.performer(
        X, X, X, scale=jnp.asarray(True)
    ),
    "softmax: scale must be one number, got True": lambda: A.softmax(
        X, X, X, scale=True
    ),
    "softmax: scale must be an array of real numbers, got complex64": lambda: A.softmax(
        X, X, X, scale=jnp.asarray(1 + 0j)
    ),
    "performer: statistics.a must be an array of floating numbers, got a list": (
        lambda: A.performer(
            X, X, X, features="favor#", statistics=A.Statistics([0.0] * H, np.eye(H))
        )
    ),
    "favor_statistics: scale must be positive and finite, got -1.0": lambda: (
        A.favor_statistics(X, X, scale=-1.0)
    ),
    "favor_statistics: scale must be one number, got (2,)": lambda: A.favor_statistics(
        X, X, scale=TWO
    ),
    "favor_statistics: key must be an array of floating numbers, got None": lambda: (
        A.favor_statistics(X, None)
    ),
    f"favor_statistics: .* head size, got query () and key {(B, T, N, H)}": lambda: (
        A.favor_statistics(X.sum(), X)
    ),
    "hedgehog: x must be an array of floating numbers, got complex64": lambda: (
        A.hedgehog(X.astype(np.complex64), np.ones((N, H, 2), np.float32))
    ),
    "t2r: bias must be an array of floating numbers, got None": lambda: A.t2r(
        X, np.ones((N, H, 2), np.float32), None
    ),
    f"linear_causal: features must map .* to [B T N M], got {(B, T, N)}": (
        lambda: A.linear_causal(X, X, X, features=lambda x: x.sum(axis=-1))
    ),
    "linear_state: features must map [B T N H]": lambda: A.linear_state(
        B, N, H, H, features=jnp.sum
    ),
    "gated_log_decay: power must be finite, got nan": lambda: A.gated_log_decay(
        X, np.nan
    ),
    "retention_log_decay: heads must be an int, got 2.5": lambda: A.retention_log_decay(
        2.5
    ),
    "lightning_log_decay: layer must be an int, got 0.5": lambda: A.lightning_log_decay(
        4, 0.5, 2, convention="fla"
    ),
    "delta_state: batch must be an int, got 2.0": lambda: A.delta_state(2.0, N, H, H),
    "flash_state: group_size must be an int, got None": lambda: A.flash_state(
        B, N, H, H, group_size=None
    ),
    "linear_causal: axis_name must be a mesh axis of a jax.shard_map around the call, "
    "got 'time'": lambda: A.linear_causal(X, X, X, axis_name="time"),
    "flash_causal: axis_name must be a mesh axis": lambda: A.flash_causal(
        *[X] * 5, segment_ids=np.ones((B, T), int), axis_name="time"
    ),
    "softmax: axis_name must be a mesh axis": lambda: A.softmax(X, X, X, axis_name=3),
    "differential_v2: lam must be an array, got None": lambda: A.differential_v2(
        X[:, :, :2], X[:, :, :1], X[:, :, :1], None
    ),
    "differential: lam must be an array, got 1000": lambda: A.differential(
        X[:, :, :2], X[:, :, :2], X[:, :, :1], 10**30
    ),
    "differential_lambda: key_1 must be an array of floating numbers, got None": (
        lambda: A.differential_lambda(TWO, None, TWO, TWO, 0.8)
    ),
    "lambda_initial: depth must be one number, got 'x'": lambda: A.lambda_initial("x"),
    "lambda_initial: depth must be finite, got nan": lambda: A.lambda_initial(np.nan),
    "gated_log_decay: power must be one number, got None": lambda: A.gated_log_decay(
        X, None
    ),
    "lightning_log_decay: convention an array of shape (2,) is unknown: choose": (
        lambda: A.lightning_log_decay(4, 0, 2, convention=TWO)
    ),
    "favor_statistics: kind an array of shape (2,) is unknown: choose from": (
        lambda: A.favor_statistics(X, X, kind=TWO)
    ),
    "softmax: implementation an array of shape (2,) is unknown: choose": (
        lambda: A.softmax(X, X, X, implementation=TWO)
    ),
    "softmax: length_base must be a number, got an array of shape (2,)": (
        lambda: A.softmax(X, X, X, length_base=TWO)
    ),
    "sparsemax: is_causal must be True or False, got an array of shape (2,)": (
        lambda: A.sparsemax(X, X, X, is_causal=TWO)
    ),
    "symmetric_key: normalise 'x' is unknown: choose": lambda: A.symmetric_key(
        X, normalise="x"
    ),
    "symmetric_key: metric must be an array of floating numbers, got complex64": (
        lambda: A.symmetric_key(X, np.ones((N, H, H), np.complex64))
    ),
    "matrix_function: segment_ids are not possible.* got 'x'": (
        lambda: A.matrix_function(X, X, "exp", segment_ids="x")
    ),
    "flash_causal: return_state must be True or False, got 1": lambda: A.flash_causal(
        *[X] * 5, return_state=1
    ),
    "flash_step needs keys [B group K H] in its state": lambda: A.flash_step(
        A.flash_state(B, N, H, H)._replace(key=None), *[X[:, :1]] * 5
    ),
    "flash: divisor must be a constant number above 0, got inf": lambda: A.flash(
        *[X] * 5, divisor=np.inf
    ),
    "gau: divisor must be a constant number above 0, .* got True": lambda: A.gau(
        X, X, X, divisor=True
    ),
    "rotate: x must be an array of floating numbers, got int64": lambda: A.rotate(
        X.astype(int), IDS
    ),
    "rotate: x must be [batch, time, heads, size]": lambda: A.rotate(X[0], IDS),
    "rotate: positions must be an array, got None": lambda: A.rotate(X, None),
    "rotate: base must be positive and finite, got 0": lambda: A.rotate(X, IDS, 0),
    "rotate: share must be one number, got None": lambda: A.rotate(X, IDS, share=None),
    "rotate: interleaved must be True or False, got 'no'": lambda: A.rotate(
        X, IDS, interleaved="no"
    ),
    "sinusoidal: width must be at least 2, got 0": lambda: A.sinusoidal(IDS, 0),
    "sinusoidal: width must be an int, got 4.0": lambda: A.sinusoidal(IDS, 4.0),
    "sinusoidal: base must be positive and finite, got -1": lambda: A.sinusoidal(
        IDS, 4, -1
    ),
    "sinusoidal: positions must be an array of real numbers, got complex64": (
        lambda: A.sinusoidal(IDS.astype(np.complex64), 4)
    ),
    "softmax: sink must have one logit per head (3,)": lambda: A.softmax(
        X, X, X, sink=TWO
    ),
    "softmax: length_scale 'far' is unknown: choose from floor, distance": lambda: (
        A.softmax(X, X, X, length_scale="far")
    ),
    "softmax: length_scale must be a name or (slope, power), got 3": lambda: A.softmax(
        X, X, X, length_scale=3
    ),
    "softmax: length_base 5 and length_scale 'floor' are two laws": lambda: A.softmax(
        X, X, X, length_base=5, length_scale="floor"
    ),
    "softmax: slope must broadcast to (2, 5, 3)": lambda: A.softmax(
        X, X, X, length_scale=(X, X)
    ),
    "softmax: log_decay must broadcast to (": lambda: A.softmax(
        X, X, X, log_decay=TWO[None, None]
    ),
    "decay_causal: log_decay must be at most 0, got an array of shape (3,) with 0.5": (
        lambda: A.decay_causal(X, X, X, np.array([-0.5, 0.5, np.nan]))
    ),
    "decay_step: log_decay must be at most 0, .* with 1": lambda: A.decay_step(
        A.decay_state(B, N, H, H), *[X[:, :1]] * 4
    ),
    "delta_causal: log_decay must be at most 0, .* with 1": lambda: A.delta_causal(
        X, X, X, X[..., 0], X
    ),
    "matrix_function_causal: log_decay must be at most 0, .* with 1": lambda: (
        A.matrix_function_causal(X, X, "exp", scale=0.1, log_decay=X[..., 0])
    ),
    "softmax: log_decay must be at most 0, .* with 1": lambda: A.softmax(
        X, X, X, log_decay=jnp.asarray(X[..., 0])
    ),
    "alibi_slopes: heads must be an int, got 'x'": lambda: A.alibi_slopes("x"),
    "alibi_slopes: heads must be at least 1, got 0": lambda: A.alibi_slopes(0),
    "alibi_bias: slopes must be an array, got None": lambda: A.alibi_bias(None, TWO),
    "alibi_bias: slopes must have one axis, got ()": lambda: A.alibi_bias(3.0, TWO),
    "alibi_bias: keys must be an array, got None": lambda: A.alibi_bias(2, None),
    "alibi_bias: rows must have one axis, got ()": lambda: A.alibi_bias(2, TWO, 3.0),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_argument_is_named_with_its_function(message):
    start, *rest = message.split(".*")
    pattern = ".*".join(re.escape(part) for part in (start, *rest))
    with pytest.raises(ValueError, match=f"^{pattern}") as refusal:
        WRONG[message]()
    assert "\n" not in str(refusal.value)


def test_a_switch_that_is_traced_is_refused_and_later_calls_work():
    """Programs are cached by switches. A traced switch used to break later calls."""
    wanted = A.softmax(X, X, X, mask_self=True)
    with pytest.raises(ValueError, match="softmax: mask_self must be True or False"):
        jax.jit(lambda hide: A.softmax(X, X, X, mask_self=hide))(True)
    with pytest.raises(ValueError, match="softmax: mask_self must be True or False"):
        A.softmax(X, X, X, mask_self=jnp.array(True))
    np.testing.assert_array_equal(A.softmax(X, X, X, mask_self=True), wanted)


@pytest.mark.parametrize("outer", [lambda run: run, jax.jit], ids=["eager", "jit"])
def test_constants_of_a_shard_map_are_checked(outer):
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    split = {"in_specs": P("data"), "out_specs": P("data"), "mesh": mesh}

    def run(rates):
        def call(x):
            return A.decay_causal(x, x, x, rates)

        return outer(jax.shard_map(call, **split, check_vma=False))(X)

    low = jnp.full(N, -0.5, jnp.bfloat16)
    np.testing.assert_allclose(run(low), A.decay_causal(X, X, X, low), rtol=1e-6)
    with pytest.raises(ValueError, match="log_decay must be at most 0, .* with 0.5"):
        run(-low)


def test_constants_of_a_program_are_checked_and_traced_values_are_not():
    """Under `jax.jit`, and with a NaN, which is no log-decay above 0."""

    def call(x, rates):
        return A.decay_causal(x, x, x, rates)

    low, high = jnp.full(N, -0.5), jnp.full(N, 0.5)
    assert np.isfinite(jax.jit(call)(X, high)).all()
    np.testing.assert_array_equal(jax.jit(lambda x: call(x, low))(X), call(X, low))
    for known in (high, np.asarray(high)):
        with pytest.raises(ValueError, match="log_decay must be at most 0"):
            jax.jit(lambda x, known=known: call(x, known))(X)
    assert np.isnan(call(X, np.array([np.nan, -1, -1]))).any()
    scaled = jax.jit(
        lambda x, scale: A.matrix_function_causal(x, x, "expm1", scale=scale)
    )
    wanted, scale = scaled(X, 0.1), jnp.float32(0.1)
    inside = jax.jit(lambda x: A.matrix_function_causal(x, x, "expm1", scale=scale))
    np.testing.assert_allclose(inside(X), wanted, rtol=1e-6)


NONE, HIDDEN = X[:, :0], np.ones((B, 1, 1, 0), bool)
EMPTY = {
    "cosine": lambda q: A.cosine(q, NONE, NONE, HIDDEN),
    "cosine_causal": lambda q: A.cosine_causal(q[:, :0], NONE, NONE, HIDDEN),
    "decay_causal": lambda q: A.decay_causal(
        q[:, :0], NONE, NONE, np.zeros(N, np.float32), HIDDEN
    ),
    "delta_causal": lambda q: A.delta_causal(
        q[:, :0], NONE, NONE, NONE[..., 0], None, HIDDEN
    ),
    "flash": lambda q: A.flash(q[:, :0], *[NONE] * 4, HIDDEN),
    "flash_causal": lambda q: A.flash_causal(
        q[:, :0], *[NONE] * 4, HIDDEN, return_state=True
    )[0],
    "linear": lambda q: A.linear(q, NONE, NONE, HIDDEN),
    "a function": lambda q: A.linear(q, NONE, NONE, HIDDEN, features=jnp.square),
    "linear_causal": lambda q: A.linear_causal(q[:, :0], NONE, NONE, HIDDEN),
    "performer": lambda q: A.performer(q, NONE, NONE, mask=HIDDEN),
    "performer_causal": lambda q: A.performer_causal(q[:, :0], NONE, NONE, mask=HIDDEN),
    "softmax": lambda q: A.softmax(q, NONE, NONE, mask=HIDDEN),
}


@pytest.mark.parametrize("name", EMPTY)
def test_no_tokens_with_a_mask_give_nothing(name):
    output = EMPTY[name](X)
    assert output.shape in (X.shape, NONE.shape)
    np.testing.assert_array_equal(output, 0)
