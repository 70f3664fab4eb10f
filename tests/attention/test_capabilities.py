"""The capability matrix: what a cell claims works, what it denies raises by name."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from symjax import attention
from symjax.attention.capabilities import ROWS, capabilities

B, T, S, N, K, H, V, G = 2, 9, 11, 6, 3, 4, 5, 8
M = 16

every_mechanism = pytest.mark.parametrize("name", ROWS)
# What some mechanisms are given besides query, key and value.
MORE = {
    "decay": lambda keys, heads: {"log_decay": jnp.zeros((B, keys, heads))},
    "performer": lambda keys, heads: {"projection": jnp.ones((M, H))},
    "gau": lambda keys, heads: {"divisor": 7.0},
    "flash": lambda keys, heads: {"group_size": G},
}


def call(name, *, keys=T, heads=K, form="attend", **options):
    """The shapes of what a form returns; every check of its arguments is made."""
    query, key = jnp.ones((B, T, N, H)), jnp.ones((B, keys, heads, H))
    value = jnp.ones((B, keys, heads, V))
    options = MORE.get(name, lambda *_: {})(keys, heads) | options
    arrays = {
        "matrix_function": (query, value, "exp"),
        "flash": (query, key, query, key, value),
    }.get(name, (query, key, value))
    function = getattr(ROWS[name], form)
    return jax.eval_shape(lambda: function(*arrays, **options))


def call_with_own_keys(name, **options):
    """With as many heads everywhere, as symmetric ones need."""
    return call(name, **{"heads": N, **options})


def it_works(shapes):
    assert shapes.shape == (B, T, N, V)


def refused(words, name, **options):
    with pytest.raises((ValueError, TypeError), match=words):
        call_with_own_keys(name, **options)


@every_mechanism
def test_causal_and_bidirectional(name):
    claims = capabilities(ROWS[name])
    if ROWS[name].causal is not None:
        it_works(call(name, form="causal"))
    elif claims.causal:
        it_works(call(name, is_causal=True))
    else:
        refused("is_causal", name, is_causal=True)
    if claims.bidirectional:
        it_works(call_with_own_keys(name))
    else:  # a form that has no such option may see all keys without it
        refused("is_causal", name, is_causal=False)
        assert ROWS[name].attend is ROWS[name].causal


@every_mechanism
def test_masks(name):
    keys, pairs = jnp.ones((B, 1, 1, T), bool), jnp.ones((B, 1, T, T), bool)
    it_works(call_with_own_keys(name, mask=keys))
    if capabilities(ROWS[name]).mask == "pairs":
        it_works(call_with_own_keys(name, mask=pairs))
    else:
        refused(re.escape(str(pairs.shape)), name, mask=pairs)


@every_mechanism
def test_bias(name):
    bias = jnp.ones((1, N, T, T))
    if capabilities(ROWS[name]).bias:
        it_works(call_with_own_keys(name, bias=bias))
    else:
        refused("bias", name, bias=bias)


@every_mechanism
def test_grouped_heads(name):
    if capabilities(ROWS[name]).grouped:
        it_works(call(name))
    else:
        with pytest.raises(ValueError, match=re.escape(str((B, T, K, V)))):
            call(name)


@every_mechanism
def test_more_or_fewer_keys_than_queries(name):
    if capabilities(ROWS[name]).lengths:
        it_works(call(name, keys=S))
    else:
        refused(re.escape(str((B, S, N))[:-1]), name, keys=S)


@every_mechanism
def test_segments(name):
    segments = jnp.zeros((B, T), jnp.int32)
    if capabilities(ROWS[name]).segments:
        it_works(call_with_own_keys(name, segment_ids=segments))
    else:
        refused("segment_ids", name, segment_ids=segments)


@every_mechanism
def test_the_state_has_the_size_of_the_table(name):
    """Of one head, batch 1; what is counted a row of keys grows with them."""
    mechanism = ROWS[name]
    if not capabilities(mechanism).steps:
        assert mechanism.state is None and mechanism.step is None
        return
    options = {"group_size": G} if name == "flash" else {}
    if name == "performer":
        options = {"projection": jnp.ones((M, H))}
    state = mechanism.state(1, 1, H, V, **options)
    features = M if name == "performer" else H
    letters = {"H": H, "V": V, "G": G, "M": features}
    counted = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", mechanism.memory)
    arrays = [x for x in jax.tree.leaves(state) if x.ndim > 1]  # one place a row
    assert sum(x.size for x in arrays) == eval(counted, letters)
    assert all(math.isfinite(x) or x == -jnp.inf for x in arrays[0].ravel())


def test_the_table_has_a_row_for_each_and_a_cell_for_each_claim():
    lines = attention.table().splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(ROWS)
    assert set(attention.MECHANISMS) < set(ROWS)
    for line, mechanism in zip(lines[1:], ROWS.values(), strict=True):
        claims = capabilities(mechanism)
        cells = line.split()[1 : 1 + len(claims)]
        shown = ["yes" if x is True else "-" if x is False else x for x in claims]
        assert cells == shown
