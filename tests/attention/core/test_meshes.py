"""Mechanisms on meshes: axes of any type, and inside `shard_map`."""

from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from laws import close

from symjax import attention as A
from symjax.attention.core.devices import by_platform, lowered_for, platforms
from symjax.attention.core.meshes import batched_alike

B, T, N, K, H, V = 4, 12, 4, 2, 8, 6
CAUSAL = {"is_causal": True}
MECHANISMS = {
    "softmax": partial(A.softmax, **CAUSAL),
    "whole": partial(A.softmax, implementation="whole", length_base=4.0),
    "entmax15": partial(A.entmax15, **CAUSAL),
    "window": partial(A.softmax, window=(3, 0)),
    "differential_v2": lambda query, key, value: A.differential_v2(
        query, key, value, 0.3 * np.ones((*query.shape[:2], query.shape[2] // 2), "f4")
    ),
    "hidden": lambda query, key, value: A.sparsemax(
        query,
        key,
        value,
        mask=np.arange(T)[None, None, None] != 3,
        segment_ids=np.arange(T)[None].repeat(query.shape[0], 0) // 5,
    ),
    "linear": A.linear_causal,
    "cosine": A.cosine_causal,
    "performer": A.performer_causal,
    "decay": lambda query, key, value: A.decay_causal(
        query, key, value, -0.1 * np.ones((1, 1, key.shape[2]), np.float32)
    ),
    "delta": lambda query, key, value: A.delta_causal(
        *(query, key / 3, value, np.ones(key.shape[:3], np.float32)),
        -0.1 * np.ones((1, 1, key.shape[2]), np.float32),
    ),
    "flash": lambda query, key, value: A.flash_causal(
        query, key, query, key, value, group_size=4
    ),
    "segments": lambda query, key, value: A.linear(
        query, key, value, segment_ids=np.zeros(query.shape[:2], int)
    ),
    "exp": lambda query, key, value: A.matrix_function(key, value, "exp"),
}
every_mechanism = pytest.mark.parametrize("name", MECHANISMS)


def mesh(kind):
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)


def arrays():
    rng = np.random.default_rng(0)
    sizes = (N, H), (K, H), (K, V)
    return [rng.normal(size=(B, T, *size)).astype(np.float32) for size in sizes]


def graded(function, given):
    """Return the output, and the gradients of the sum of its squares."""

    @jax.jit
    def both(*arrays):
        output, back = jax.vjp(function, *arrays)
        return output, back(2 * output)

    output, gradients = both(*given)
    return [output, *gradients]


def same_as_alone(name, function, given):
    found = graded(function, given)
    for one, two in zip(found, graded(MECHANISMS[name], arrays()), strict=True):
        if np.any(two):
            close(one, np.asarray(two), 1e-5)
        else:
            assert not np.any(one)
    return found[0]


@every_mechanism
def test_shard_map_counts_the_axes_that_arrays_vary_over(name):
    """With the default `check_vma`; each device has one example and one head."""
    split = P("x", None, "y")
    function = jax.shard_map(
        MECHANISMS[name], mesh=mesh(AxisType.Auto), in_specs=split, out_specs=split
    )
    same_as_alone(name, function, arrays())


def test_the_state_of_flash_has_one_place_for_all_heads():
    """The state can leave a `shard_map` over heads with the specs it entered with."""

    def read(state, *arrays):
        query, key, value = (x[:, :-1] for x in arrays)
        options = {"group_size": 4, "state": state, "return_state": True}
        _, state = A.flash_causal(query, key, query, key, value, **options)
        query, key, value = (x[:, -1:] for x in arrays)
        return A.flash_step(state, query, key, query, key, value)

    heads, example = P("x", None, "y"), P("x")
    places = type(A.flash_state(1, 1, 1, 1))(heads, heads, heads, example, P("x", "y"))
    function = jax.shard_map(
        read,
        mesh=mesh(AxisType.Auto),
        in_specs=(places, heads, heads, heads),
        out_specs=(heads, places),
    )
    given = A.flash_state(B, K, H, V, group_size=4), *arrays()
    found, wanted = jax.jit(function)(*given), read(*given)
    assert (wanted[1].place == T % 4).all()
    jax.tree.map(lambda x, y: close(x, np.asarray(y), 1e-5), found, wanted)


@pytest.mark.parametrize("split", [P("x", None, "y"), P("x", "y")], ids=str)
@every_mechanism
def test_axes_may_be_explicit(name, split):
    """Axes of `jax.make_mesh` are explicit by default. The output is sharded as the
    query."""
    sharding = NamedSharding(mesh(AxisType.Explicit), split)
    given = [jax.device_put(x, sharding) for x in arrays()]
    output = same_as_alone(name, MECHANISMS[name], given)
    assert output.sharding.spec[:3] == (*split, None)[:3]


@pytest.mark.parametrize("width", [3, 0])
def test_a_result_that_is_not_batched_counts_once(width):
    """A function with a custom derivative, through `jax.vmap` over one argument."""

    def plain(one, two):
        return jnp.sin(one @ two), one**2

    def alike(*given):
        return batched_alike(plain(*given))

    own = jax.custom_vjp(alike)
    own.defvjp(partial(jax.vjp, alike), lambda pull, change: pull(change))
    rng = np.random.default_rng(0)
    one, two = rng.normal(size=(5, 4)), rng.normal(size=(2, 4, width))

    def loss(function, one):
        found = jax.vmap(function, (None, 0))(one, two)
        return sum((x**2).sum() for x in found)

    found, wanted = (jax.grad(partial(loss, x))(one) for x in (own, plain))
    close(found, np.asarray(wanted), 1e-6)


def test_half_of_the_heads_may_be_fewer_than_devices():
    sharding = NamedSharding(mesh(AxisType.Explicit), P(None, None, ("x", "y")))
    query, key, value = arrays()
    given = jax.device_put(query, sharding), key, value
    same_as_alone("differential_v2", MECHANISMS["differential_v2"], given)


def test_steps_go_on_over_explicit_axes():
    sharding = NamedSharding(mesh(AxisType.Explicit), P("x", None, "y"))
    given = [jax.device_put(x, sharding) for x in arrays()]
    prefill = jax.jit(lambda *arrays: A.linear_causal(*arrays, return_state=True))
    step = jax.jit(A.linear_step)
    _, state = prefill(*(x[:, :-1] for x in given))
    output, _ = step(state, *(x[:, -1:] for x in given))
    close(output, np.asarray(A.linear_causal(*arrays()))[:, -1:], 1e-5)


def test_no_module_hides_a_mechanism():
    """`A.decay(…)` must not resolve to a file of that name."""
    names = {*A.__all__, *A.MECHANISMS}
    assert not [x for x in names if isinstance(getattr(A, x, None), ModuleType)]


def put(array, *split):
    sharding = NamedSharding(mesh(AxisType.Explicit), P(*split))
    return jax.device_put(array, sharding)


@pytest.mark.parametrize("name", ["softmax", "linear", "decay", "performer"])
def test_queries_may_be_on_no_mesh(name):
    query, key, value = arrays()
    given = query, put(key, "x", None, "y"), put(value, "x", None, "y")
    with jax.set_mesh(mesh(AxisType.Explicit)):
        same_as_alone(name, MECHANISMS[name], given)


def test_segment_ids_may_be_split_over_time():
    segment_ids = np.arange(T)[None].repeat(B, 0) // 5
    split = put(segment_ids, None, "x")
    given = [put(x, None, "x") for x in arrays()]
    for attend in (A.softmax, A.linear):
        found = jax.jit(partial(attend, segment_ids=split))(*given)
        close(found, np.asarray(attend(*arrays(), segment_ids=segment_ids)), 1e-5)


@pytest.mark.parametrize("attend", [A.linear_causal, A.decay_causal, A.softmax])
def test_branches_may_be_split_by_heads(attend):
    """Values, λ and masks are repeated for both branches when heads are split."""
    query, key, _ = arrays()
    key = np.concatenate([key, key], axis=2)
    value = key.reshape(B, T, K, 2 * H)
    options = {"mask": np.tri(T, dtype=bool)[None, None].repeat(2, 1)}
    if attend is not A.softmax:
        options = {"attend": attend}
    if attend is A.decay_causal:
        options["attend"] = lambda *given: attend(*given, -0.1 * np.ones(4, "f4"))
    wanted = A.differential(query, key, value, 0.3, **options)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        given = [put(x, "x", None, "y") for x in (query, key, value)]
        if "mask" in options:
            options["mask"] = put(options["mask"], None, "y")
        found = jax.jit(partial(A.differential, lam=0.3, **options))(*given)
    close(found, np.asarray(wanted), 1e-5)


def test_a_short_query_reads_keys_that_are_split_over_time():
    query, key, _ = arrays()
    key = np.concatenate([key, key], axis=2)
    value = key.reshape(B, T, K, 2 * H)
    attend = partial(A.differential, lam=0.3, is_causal=True)
    found = jax.jit(attend)(query[:, :1], put(key, None, "x"), put(value, None, "x"))
    close(found, np.asarray(attend(query[:, :1], key, value)), 1e-5)


def test_a_shard_map_may_leave_axes_to_xla():
    attend = jax.shard_map(
        A.performer_causal,
        mesh=mesh(AxisType.Auto),
        in_specs=P("x"),
        out_specs=P("x"),
        axis_names={"x"},
    )
    same_as_alone("performer", attend, arrays())


def traced(*forms, default="default"):
    """Return the forms that a call of `by_platform` traces."""
    found = []

    def form(name, x):
        found.append((name, *sorted(platforms())))
        return x

    options = {name: partial(form, name) for name in forms}
    call = partial(by_platform, default=partial(form, default), **options)
    jax.jit(call).trace(jnp.zeros(()))
    return found


def test_only_the_form_for_this_machine_is_traced():
    assert traced("cpu") == [("cpu", "cpu")]
    assert traced("cuda", "tpu") == [("default", "cpu")]


def test_each_form_is_traced_for_its_own_platforms():
    with lowered_for("cpu", "cuda", "tpu"):
        assert traced("cpu") == [("cpu", "cpu"), ("default", "cuda", "tpu")]
        assert traced("cuda", "tpu") == [
            ("cuda", "cuda"),
            ("tpu", "tpu"),
            ("default", "cpu"),
        ]
    with lowered_for("cuda", "cpu"):
        assert traced("cpu", "cuda") == [("cpu", "cpu"), ("cuda", "cuda")]


@pytest.mark.parametrize(
    "kind, platform, wanted",
    [
        ("TPU v5 lite", "tpu", {"tpu"}),
        ("NVIDIA H200", "gpu", {"cuda"}),
        ("AMD Instinct MI300X", "gpu", {"rocm"}),
        ("of nobody", "gpu", {"cuda", "rocm"}),
    ],
)
def test_a_mesh_says_what_a_program_is_lowered_for(kind, platform, wanted):
    device = AbstractDevice(kind, 1, platform)
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert platforms() == wanted
