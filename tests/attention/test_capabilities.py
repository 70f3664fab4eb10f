"""The capability table: what it claims works, what it denies raises by name."""

import inspect
import math
import pydoc
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from symjax import attention, config
from symjax.attention.mechanisms import MECHANISMS, SCORED, Mechanism, capabilities
from symjax.attention.scores.mechanism import ScoreMechanism
from symjax.attention.softmax import softmax_weights
from symjax.layers import Attention

B, T, S, N, K, H, V, G = 2, 9, 11, 6, 3, 4, 5, 8
M = 16

every_mechanism = pytest.mark.parametrize("name", MECHANISMS)
# Name of an argument → value that is passed to functions that take it.
GIVEN = {
    "query": lambda keys, heads: jnp.ones((B, T, N, H)),
    "key": lambda keys, heads: jnp.ones((B, keys, heads, H)),
    "value": lambda keys, heads: jnp.ones((B, keys, heads, V)),
    "projection": lambda keys, heads: jnp.ones((M, H)),
    "divisor": lambda keys, heads: 7.0,
    "group_size": lambda keys, heads: G,
    "function": lambda keys, heads: "exp",
    "scale": lambda keys, heads: 0.3,
}


def arguments(function, keys=T, heads=K, required=()):
    """Return the arguments in `GIVEN`, and zeros for other required operands."""
    parameters = inspect.signature(function).parameters
    found = {x: make(keys, heads) for x, make in GIVEN.items() if x in parameters}
    sizes = {"B": B, "T": keys, "K": heads, "N": N, "H": H, "V": V, "M": M}
    for name in required:
        axes = axes_of(parameters[name].annotation)
        found[name] = jnp.zeros([sizes[x] for x in axes])
    return found


def axes_of(annotation):
    """Return the letters of an array's axes, by the first shape of its annotation.

    `Float[Array, "#B #T K *F"] | None` gives B, T and K.
    """
    kinds = typing.get_args(annotation) or (annotation,)
    shapes = [x.dim_str for x in kinds if hasattr(x, "dim_str")]
    assert shapes, f"a required operand needs a shape, got {annotation}"
    axes = [x.removeprefix("#") for x in shapes[0].split()]
    return [x for x in axes if not x.startswith("*")]


def call(name, *, keys=T, heads=K, form="attend", **options):
    """Return the shapes of the results of a form, with all checks of arguments."""
    mechanism = MECHANISMS[name]
    function = getattr(mechanism, form)
    options = arguments(function, keys, heads, mechanism.required) | options
    return jax.eval_shape(lambda: function(**options))


def call_with_own_keys(name, **options):
    """Return the shapes of results with as many key heads as query heads."""
    return call(name, **{"heads": N, **options})


def it_works(shapes):
    assert shapes.shape == (B, T, N, V)


def refused(words, name, **options):
    with pytest.raises((ValueError, TypeError), match=words):
        call_with_own_keys(name, **options)


@every_mechanism
def test_causal_and_bidirectional(name):
    claims = capabilities(MECHANISMS[name])
    if MECHANISMS[name].causal is not None:
        it_works(call_with_own_keys(name, form="causal"))
    elif claims["causal"]:
        it_works(call(name, is_causal=True))
    else:
        refused("is_causal", name, is_causal=True)
    if claims["bidirectional"]:
        it_works(call_with_own_keys(name))
    else:  # without the option a form may see all keys
        refused("is_causal", name, is_causal=False)
        assert MECHANISMS[name].attend is MECHANISMS[name].causal


@every_mechanism
def test_masks(name):
    keys, pairs = jnp.ones((B, 1, 1, T), bool), jnp.ones((B, 1, T, T), bool)
    it_works(call_with_own_keys(name, mask=keys))
    if capabilities(MECHANISMS[name])["mask"] == "pairs":
        it_works(call_with_own_keys(name, mask=pairs))
    else:
        refused(re.escape(str(pairs.shape)), name, mask=pairs)


@every_mechanism
def test_bias(name):
    bias = jnp.ones((1, N, T, T))
    if capabilities(MECHANISMS[name])["bias"]:
        it_works(call_with_own_keys(name, bias=bias))
    else:
        refused("bias", name, bias=bias)


@every_mechanism
def test_gates(name):
    log_decay = jnp.zeros((B, T, N))
    if capabilities(MECHANISMS[name])["gates"]:
        it_works(call_with_own_keys(name, log_decay=log_decay))
    elif not MECHANISMS[name].gated:  # for gated units the block decides
        refused("log_decay", name, log_decay=log_decay)


@every_mechanism
def test_sinks(name):
    if capabilities(MECHANISMS[name])["sink"]:
        it_works(call_with_own_keys(name, sink=jnp.zeros(N)))
    elif not MECHANISMS[name].gated:
        refused("sink", name, sink=jnp.zeros(N))


@every_mechanism
def test_windows(name):
    if capabilities(MECHANISMS[name])["window"]:
        it_works(call_with_own_keys(name, window=(3, None)))
    else:
        refused("window", name, window=(3, None))


@every_mechanism
def test_grouped_heads(name):
    if capabilities(MECHANISMS[name])["grouped"]:
        it_works(call(name))
    else:
        with pytest.raises(ValueError, match=re.escape(str((B, T, K, V)))):
            call(name)


@every_mechanism
def test_more_or_fewer_keys_than_queries(name):
    if capabilities(MECHANISMS[name])["lengths"]:
        it_works(call(name, keys=S))
    else:
        refused(re.escape(str((B, S, N))[:-1]), name, keys=S)


@every_mechanism
def test_segments(name):
    segments = jnp.zeros((B, T), jnp.int32)
    form = "attend" if MECHANISMS[name].causal is None else "causal"
    if capabilities(MECHANISMS[name])["segments"]:
        it_works(call_with_own_keys(name, segment_ids=segments, form=form))
    else:
        refused("segment_ids", name, segment_ids=segments)


@every_mechanism
def test_a_kernel(name):
    if "tpu" in MECHANISMS[name].implementations:
        it_works(call(name, implementation="tpu"))
    else:
        refused("implementation", name, implementation="tpu")
    scored = "tpu" in MECHANISMS[name].implementations
    families = "cosine", "decay", "delta", "linear", "performer"
    assert capabilities(MECHANISMS[name])["kernel"] == (scored or name in families)


def test_a_mechanism_made_from_the_entry_of_scores_claims_no_kernel():
    own = ScoreMechanism("own", softmax_weights)
    assert own.implementations == ("rows", "whole")
    assert not capabilities(SCORED._replace(attend=own))["kernel"]


@every_mechanism
def test_the_state_has_the_size_of_the_table(name):
    """For one head and batch 1. A size given per key grows with the keys."""
    mechanism = MECHANISMS[name]
    if not capabilities(mechanism)["steps"]:
        assert mechanism.state is None and mechanism.step is None
        return
    state = mechanism.state(1, 1, H, V, **arguments(mechanism.state))
    features = M if "projection" in mechanism.operands else H
    letters = {"H": H, "V": V, "G": G, "M": features}
    counted = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", mechanism.memory)
    arrays = [x for x in jax.tree.leaves(state) if x.ndim > 1]  # an entry per row
    assert sum(x.size for x in arrays) == eval(counted, letters)
    assert all(math.isfinite(x) or x == -jnp.inf for x in arrays[0].ravel())


def test_the_table_has_a_row_for_each_and_a_cell_for_each_claim():
    lines = attention.table().splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(MECHANISMS)
    for line, mechanism in zip(lines[1:], MECHANISMS.values(), strict=True):
        claims = capabilities(mechanism)
        cells = line.split()[1 : 1 + len(claims)]
        shown = {True: "yes", False: "-"}
        assert cells == [shown.get(claim, claim) for claim in claims.values()]


# A value of each option that a form must accept.
CHOSEN = {
    "features": "relu",
    "scale": 0.5,
    "window": 4,
    "length_base": 5.0,
    "length_scale": "floor",
    "mask_self": True,
    "implementation": "whole",
    "chunk_size": 4,
    "group_size": 4,
    "function": "expm1",
    "alpha": None,
    "normalise": "rows",
}


@every_mechanism
def test_every_form_takes_the_options_that_are_declared(name):
    """All other options are refused. Only the causal form takes `chunk_size`."""
    mechanism = MECHANISMS[name]
    for option in mechanism.options:
        if option == "implementation" and mechanism.state is not None:
            continue  # of one kind of GPU: kernels/test_jla.py
        chosen = {option: CHOSEN[option]}
        if option != "chunk_size":
            it_works(call_with_own_keys(name, **chosen))
        if mechanism.causal is not None:
            it_works(call_with_own_keys(name, form="causal", **chosen))
    for option in CHOSEN.keys() - set(mechanism.options):
        if not mechanism.gated:  # for gated units the block decides
            with pytest.raises(TypeError, match=option):
                call_with_own_keys(name, **{option: CHOSEN[option]})


def test_a_mechanism_without_annotations_is_one_like_any_other(monkeypatch):
    """Capabilities are declared, and not read from the signature of a function."""

    def mean(query, key, value, mask=None, **options):
        weigh = jnp.ones(value.shape[:2]) if mask is None else mask[:, 0, 0]
        total = (
            jnp.einsum("bs,bskv->bkv", weigh, value) / weigh.sum(axis=1)[:, None, None]
        )
        return jnp.broadcast_to(total[:, None], value.shape)

    monkeypatch.setitem(MECHANISMS, "mean", Mechanism(mean, grouped=False))
    line = attention.table().splitlines()[-1].split()
    cells = ["mean", "-", "yes", "keys", "-", "-", "-", "-", "-", "yes"]
    assert line[: len(cells)] == cells
    options = config.Model(
        kind="encoder",
        width=8,
        heads=2,
        classes=2,
        attention=config.Attention(mechanism="mean"),
    )
    layer = Attention(options, 0, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 3, 8))
    wanted = layer.out(jnp.broadcast_to(layer.value(x).mean(1, keepdims=True), x.shape))
    np.testing.assert_allclose(layer(x), wanted, atol=1e-6)


def test_a_score_mechanism_shows_the_signature_that_is_promised():
    for function in (attention.softmax, attention.sparsemax, attention.entmax15):
        names = list(inspect.signature(function).parameters)
        assert names[:6] == ["query", "key", "value", "bias", "mask", "scale"]
        shown = pydoc.plain(pydoc.render_doc(function))
        assert "arXiv" in shown and "bottom-right" in shown


def test_score_mechanisms_may_be_imported_from_their_former_module():
    from symjax.attention.scores import ScoreMechanism

    assert ScoreMechanism is attention.ScoreMechanism
