"""The adapter of jax-linear-attention, which is an optional package.

Where it is installed, its form in plain jax is compared with the definitions, and its
kernels are compiled for an H200. The adapter's refusals need no package.
"""

from functools import partial
from importlib import import_module
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx
from gpus import compiled_for_an_h200
from interpreted import differentiated, padding, segments
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from symjax import config
from symjax.attention import decay_causal, delta_causal
from symjax.attention.core import devices
from symjax.attention.kernels import dispatch
from symjax.attention.kernels.gpu import jla
from symjax.layers import Attention
from symjax.layers.validate import mechanism_options
from symjax.models.attention_maps import map_of, operands_of

needs_jla = pytest.mark.skipif(
    find_spec("jla") is None, reason="needs jax-linear-attention"
)
B, T, N, K, H, V = 2, 150, 4, 2, 5, 7
# Error in float32, relative to the norm of all values. The package subtracts sums of
# log-decays. With some of `LEAST` a sum over 64 tokens is about −450, where float32 has
# a spacing of 3e-5.
WORST = 1e-5


class Plain(jla.Jla):
    """The adapter with the package's form in plain jax, on any machine."""

    def refusal(self, *_):
        return None


@pytest.fixture
def plain(monkeypatch):
    chosen = partial(Plain, form="chunked")
    monkeypatch.setitem(dispatch.OF_RECURRENCES, "jla", chosen)


def arrays(channels=False, seed=0):
    """Return queries, keys of length 1, values, β and log-decays, some of them −∞."""
    rng = np.random.default_rng(seed)
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, V)
    query, key, value = (rng.normal(size=x) for x in shapes)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    beta = 2 * rng.random((B, T, K))
    rates = -np.exp(rng.normal(size=key.shape if channels else (B, T, K)))
    rates[rng.random(rates.shape) < 0.05] = -np.inf
    return query, key, value, beta, rates


# Kind of the package → (function, definition, given arrays)
KINDS = {
    "simple_gla": (decay_causal, oracles.decay, [0, 1, 2, 4]),
    "gla": (decay_causal, oracles.decay, [0, 1, 2, 4]),
    "deltanet": (delta_causal, oracles.delta, [0, 1, 2, 3]),
    "gated_deltanet": (delta_causal, oracles.delta, [0, 1, 2, 3, 4]),
    "kda": (delta_causal, oracles.delta, [0, 1, 2, 3, 4]),
}
SEEN = [(), ("mask",), ("segment_ids",), ("mask", "segment_ids")]


@needs_jla
@pytest.mark.parametrize("names", SEEN, ids="+".join)
@pytest.mark.parametrize("kind", KINDS)
def test_it_has_the_conventions_of_the_definition(kind, names, plain):
    attend, definition, given = KINDS[kind]
    exact = arrays(channels=kind in ("gla", "kda"))
    exact = [np.float64(np.float32(exact[x])) for x in given]
    seen = {"mask": padding(T), "segment_ids": segments(T)}
    seen = {name: seen[name] for name in names}
    with devices.lowered_for("cuda"):
        call = partial(attend, implementation="jla", **seen)
        found = jax.jit(call)(*(jnp.float32(x) for x in exact))
    wanted, _ = definition(*exact, **seen)
    assert np.linalg.norm(found - wanted) < WORST * np.linalg.norm(wanted)


@needs_jla
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_chunks(kind, plain):
    """Query heads that share a key head add up its gradients."""
    attend, _, given = KINDS[kind]
    exact = arrays(channels=kind in ("gla", "kda"))
    exact = [np.float32(exact[x]) for x in given]
    seen = {"mask": padding(T), "segment_ids": segments(T)}
    with devices.lowered_for("cuda"):
        call = partial(attend, implementation="jla", **seen)
        found = differentiated(call, exact)
    wanted = differentiated(partial(attend, **seen), exact, np.float64)
    for one, two in zip(found, wanted, strict=True):
        assert np.linalg.norm(one - two) < 5 * WORST * np.linalg.norm(two)


@needs_jla
def test_decays_that_all_tokens_share(plain):
    query, key, value, *_ = (np.float32(x) for x in arrays())
    rates = np.float32([-0.1, -2])
    with devices.lowered_for("cuda"):
        found = decay_causal(query, key, value, rates, implementation="jla")
    exact = (np.float64(x) for x in (query, key, value))
    wanted, _ = oracles.decay(*exact, np.broadcast_to(rates, (B, T, K)))
    assert np.linalg.norm(found - wanted) < WORST * np.linalg.norm(wanted)


def like(length=40, heads=N, size=64, width=128, dtype=jnp.bfloat16):
    shapes = (B, length, heads, size), (B, length, K, size), (B, length, K, width)
    return [jax.ShapeDtypeStruct(x, dtype) for x in shapes]


@pytest.fixture
def hopper(monkeypatch):
    """Pretend that this is one Hopper GPU with the package, which takes any call."""
    monkeypatch.setattr(jla, "find_spec", lambda _: True)
    monkeypatch.setattr(jla, "on_hopper", lambda: True)
    monkeypatch.setattr(jla, "xla_keeps_arrays_whole", lambda: True)
    monkeypatch.setattr(jla, "_supports", lambda _: lambda *arrays, **options: True)


class Reached(Exception):
    """The kernel was called."""


def called(attend, *shapes, **options):
    return jax.eval_shape(partial(attend, implementation="jla", **options), *shapes)


def refused(words, attend, *shapes, **options):
    with pytest.raises(ValueError, match=words):
        called(attend, *shapes, **options)


def decay(query, key, value, **options):
    return decay_causal(query, key, value, jnp.zeros(K), **options)


def by_channel(query, key, value, **options):
    return decay_causal(query, key, value, jnp.zeros(key.shape), **options)


def delta(query, key, value, **options):
    return delta_causal(query, key, value, jnp.ones(key.shape[:3]), **options)


TAKEN = {"decay": decay, "by channel": by_channel, "delta": delta}


@pytest.mark.parametrize("attend", TAKEN.values(), ids=TAKEN)
def test_it_runs_where_it_is_named_and_nowhere_else(attend, hopper, monkeypatch):
    def reached(*_):
        raise Reached

    monkeypatch.setattr(jla.Jla, "attend", reached)
    with devices.lowered_for("cuda"):
        with pytest.raises(Reached):
            called(attend, *like())
        jax.eval_shape(attend, *like())


REFUSED = {
    "float32": (decay, {"dtype": jnp.float32}, {}, "it takes bfloat16, got float32"),
    "keys of 32": (decay, {"size": 32}, {}, "a key of .64, 128. dimensions, got 32"),
    "values of 256": (delta, {"width": 256}, {}, "a value of .64, 128. dim.* got 256"),
    "erase gates": (
        delta,
        {},
        {"erase": np.ones((B, 40, K, 64))},
        "it takes no erase gates",
    ),
    "return_state": (delta, {}, {"return_state": True}, "takes no state, return_state"),
}


@pytest.mark.parametrize("attend, given, options, words", REFUSED.values(), ids=REFUSED)
def test_what_it_does_not_support_is_said(attend, given, options, words, hopper):
    refused(f"implementation 'jla' .*{words}", attend, *like(**given), **options)


def test_channels_need_pairs_of_heads_of_64(hopper):
    shapes = [jax.ShapeDtypeStruct((B, 40, 3, 64), jnp.bfloat16)] * 3
    refused("a multiple of 128, got 3 of 64", by_channel, *shapes)


def test_what_the_package_refuses_is_refused(hopper, monkeypatch):
    seen = []

    def no(*arrays, **options):
        seen.extend([*(x.shape for x in arrays), options["segment_ids"].shape])
        return False

    monkeypatch.setattr(jla, "_supports", lambda kind: no)
    ids = np.zeros((B, 40), int)
    refused("refuses 'deltanet' with queries", delta, *like(), segment_ids=ids)
    heads = B, 40, N
    wanted = [(*heads, 64), (*heads, 64), (*heads, 128), heads, (B, 40)]
    assert seen == wanted
    seen.clear()  # decays come before β
    gated = partial(delta, log_decay=jnp.zeros((B, 40, K, 64)))
    refused("refuses 'kda' with queries", gated, *like(), segment_ids=ids)
    assert seen == [*wanted[:3], (*heads, 64), heads, (B, 40)]


def test_another_machine_and_no_package_are_said(hopper, monkeypatch):
    monkeypatch.setattr(jla, "xla_keeps_arrays_whole", lambda: False)
    refused("call it in a jax.shard_map", decay, *like())
    monkeypatch.setattr(jla, "on_hopper", lambda: False)
    refused("it needs a Hopper GPU", decay, *like())
    monkeypatch.setattr(jla, "find_spec", lambda _: None)
    refused(r"pip install 'symjax\[hopper\]'", decay, *like())
    with pytest.raises(ValueError, match="'mamba' is unknown: choose from jla"):
        decay_causal(*like(), jnp.zeros(K), implementation="mamba")


def test_a_shard_map_that_checks_what_varies_is_refused(hopper, monkeypatch):
    """The package's derivatives have no types of manual axes."""

    def reached(*_):
        raise Reached

    def split(check_vma):
        call = partial(decay, implementation="jla")
        specs = {"in_specs": P("x"), "out_specs": P("x"), "check_vma": check_vma}
        mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
        return jax.eval_shape(jax.shard_map(call, mesh=mesh, **specs), *like())

    monkeypatch.setattr(jla.Jla, "attend", reached)
    with devices.lowered_for("cuda"):
        with pytest.raises(ValueError, match="a jax.shard_map with check_vma=False"):
            split(True)
        with pytest.raises(Reached):
            split(False)


def model(mechanism="softmax", **choice):
    attention = config.Attention(
        mechanism=mechanism, implementation=choice.pop("implementation", "jla")
    )
    return config.Model(width=32, heads=4, attention=attention, **choice)


def test_in_a_model_it_is_for_the_layers_that_have_it():
    hybrid = model(pattern=("softmax", "delta", "linear"))
    chosen = [dict(mechanism_options(hybrid, x)) for x in range(3)]
    assert [x.get("implementation") for x in chosen] == [None, "jla", None]
    with pytest.raises(ValueError, match="'jla' is not possible: softmax takes rows"):
        mechanism_options(model(), 0)
    for other in ("whole", "cudnn", "hopper"):
        chosen = model("decay", implementation=other)
        with pytest.raises(ValueError, match=f"'{other}' is not .* decay takes jla"):
            mechanism_options(chosen, 0)
    former = model("decay", implementation="rows")
    assert "implementation" not in dict(mechanism_options(former, 0))


def test_maps_are_read_without_it():
    """No kernel takes the unit vectors in float32 that maps are read with."""

    def read(implementation):
        options = model("delta", implementation=implementation)
        layer = Attention(options, 0, rngs=nnx.Rngs(0))
        x = jax.random.normal(jax.random.key(0), (2, 9, 32))
        return map_of(layer.mixer, operands_of(layer, x, None))

    np.testing.assert_array_equal(read("jla"), read("auto"))


COMPILED = {
    "gla": lambda query, key, value, gate: decay_causal(
        query, key, value, gate, implementation="jla"
    ),
    "deltanet": lambda query, key, value, gate: delta_causal(
        *(query, key, value, jax.nn.sigmoid(gate[..., 0])), implementation="jla"
    ),
    "simple_gla": lambda query, key, value, gate: decay_causal(
        query, key, value, gate[..., 0], implementation="jla"
    ),
    "gated_deltanet": lambda query, key, value, gate: delta_causal(
        *(query, key, value, jax.nn.sigmoid(gate[..., 0]), gate[..., 1]),
        implementation="jla",
    ),
    "kda": lambda query, key, value, gate: delta_causal(
        *(query, key, value, jax.nn.sigmoid(gate[..., 0]), gate),
        implementation="jla",
    ),
}


@needs_jla
@pytest.mark.slow
@pytest.mark.parametrize("call", COMPILED.values(), ids=COMPILED)
def test_it_compiles_for_an_h200(call, monkeypatch):
    """The package looks for a GPU here; it is told that there is one."""
    for name in ("scalar_gate", "vector_gate_ops"):
        module = import_module(f"jla.ops.mosaic_gpu.{name}")
        monkeypatch.setattr(module, "is_hopper", lambda: True)
    shapes = (4, 64), (2, 64), (2, 64), (2, 64)
    dtypes = *[jnp.bfloat16] * 3, jnp.float32
    program = compiled_for_an_h200(call, *shapes, dtypes=dtypes, check_vma=False)
    assert "mosaic_gpu" in program.as_text()
