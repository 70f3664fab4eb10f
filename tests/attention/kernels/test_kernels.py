"""The TPU kernel of score mechanisms, interpreted on the CPU, equals its definition."""

import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from interpreted import STRICT
from laws import close, same

from symjax.attention.kernels.intervals import (
    blocks_of_keys,
    blocks_of_rows,
    seen_by_rows,
)
from symjax.attention.kernels.tpu.attention_gradient import attend_in_tiles

B = 2
KINDS = "softmax", "v1", "v2"
# Blocks of 128. Only two of them fit in VMEM, so keys and rows are streamed.
SMALL = {"block": 128, "resident": 256, "interpret": STRICT}


class Sizes(NamedTuple):
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_size: int
    value_size: int


ODD = Sizes(300, 330, 4, 2, 16, 24)
FEW = Sizes(330, 200, 2, 1, 16, 20)  # more queries than keys
PADDED = Sizes(300, 300, 2, 1, 16, 20)
TILED = Sizes(256, 384, 2, 2, 64, 128)  # multiples of a tile
WIDE = Sizes(140, 150, 2, 1, 256, 256)


def arrays(kind, sizes, seed=0):
    """Return query, key, value and, for two maps, λ of every token and head."""
    length, keys, heads, kv_heads, size, value_size = sizes
    maps, key_maps = 2 - (kind == "softmax"), 1 + (kind == "v1")
    rng = np.random.default_rng(seed)
    shapes = (
        (B, length, heads * maps, size),
        (B, keys, kv_heads * key_maps, size),
        (B, keys, kv_heads, value_size),
        (B, length, heads),
    )
    return [rng.normal(size=shape) for shape in shapes[: 2 + maps]]


def definition(kind, pairs, query, key, value, lam=None, *, module=jnp, **options):
    if kind == "softmax":
        return oracles.softmax(query, key, value, pairs, module=module, **options)
    if kind == "v1":  # every sub-head with a key and a value of its own
        groups = pairs.shape[1] // value.shape[2]
        key = key.reshape(*key.shape[:2], -1, 2, key.shape[3])
        key = module.repeat(key, groups, axis=2).reshape(
            *query.shape[:1], -1, *query.shape[2:]
        )
        value = module.repeat(value, 2 * groups, axis=2)
    return oracles.differential_v2(
        query, key, value, lam, pairs, module=module, **options
    )


def pairs_of(
    sizes,
    *,
    window=(None, None),
    mask=None,
    runs=None,
    mask_self=False,
):
    """Return the visible pairs [B N T S] by definition."""
    length, keys, heads, *_ = sizes
    distance = np.arange(keys) - (np.arange(length) + keys - length)[:, None]
    left, right = window
    pairs = np.ones((B, length, keys), bool)
    pairs &= distance >= -(keys + length if left is None else left)
    pairs &= distance <= (keys + length if right is None else right)
    if mask is not None:
        pairs = pairs & mask[:, None]
    if runs is not None:
        own = runs[:, keys - length :]
        pairs = pairs & (own[:, :, None] == runs[:, None])
    if mask_self:
        others = pairs & (distance != 0)
        pairs = np.where(others.any(axis=-1, keepdims=True), others, pairs)
    return np.broadcast_to(pairs[:, None], (B, heads, length, keys))


def differentiated(form, arrays, weigh):
    """Return the output, and the gradients of its product with `weigh`."""

    def both(weigh, *arrays):
        output, back = jax.vjp(form, *arrays)
        return output, back(weigh.astype(output.dtype))

    output, gradients = jax.jit(both)(weigh, *arrays)
    return output, *gradients


def segments(length, seed=5):
    """Return segment ids of runs of different lengths, one of them a single token."""
    change = np.random.default_rng(seed).random((B, length)) < 0.02
    change[:, 40:42] = True
    return np.cumsum(change, axis=1)


def padding(sizes):
    """Return a mask of right and left padding, longer than a block of keys."""
    mask = np.ones((B, sizes.keys), bool)
    mask[0, 170:], mask[1, :140] = False, False
    return mask


def holes(sizes):
    """Return a mask that hides any keys, and all keys of one example."""
    mask = np.random.default_rng(3).random((B, sizes.keys)) < 0.5
    mask[1] = False
    return mask


CAUSAL = {"window": (None, 0)}
CASES = {
    "causal": ("softmax", ODD, CAUSAL),
    "causal_v1_in_tiles": ("v1", TILED, CAUSAL),
    "heads_of_256": ("softmax", WIDE, CAUSAL),
    "grown_with_length_v2": ("v2", ODD, {**CAUSAL, "length_base": 30.0}),
    "window_of_more_queries": ("v2", FEW, {"window": (70, 40)}),
    "hidden_self_in_a_window": (
        *("softmax", PADDED),
        {"window": (100, 0), "mask_self": True, "scale": 0.7},
    ),
    "segments_with_holes_v1": (
        *("v1", PADDED),
        {**CAUSAL, "runs": segments(300), "mask": holes(PADDED)},
    ),
    "segments_both_ways": (
        *("softmax", PADDED),
        {"runs": segments(300), "mask_self": True, "length_base": 5.0},
    ),
    "padding": (
        *("softmax", PADDED),
        {**CAUSAL, "mask": padding(PADDED), "length_base": 7.0},
    ),
}


def check(kind, sizes, options, tolerance=1e-5, dtype=np.float32, **more):
    """Compare output and gradients with float64."""
    given = arrays(kind, sizes)
    weigh = np.random.default_rng(1).normal(
        size=(B, sizes.queries, sizes.heads, sizes.value_size)
    )
    seen = {k: v for k, v in options.items() if k not in ("length_base", "scale")}
    grown = {k: v for k, v in options.items() if k in ("length_base", "scale")}
    with jax.enable_x64(True):
        form = partial(definition, kind, pairs_of(sizes, **seen), **grown)
        wanted = differentiated(form, given, weigh)
    given = [jnp.asarray(x, dtype) for x in given]
    form = partial(attend_in_tiles, **{**SMALL, **options, **more})
    actual = differentiated(form, given, weigh.astype(np.float32))
    for one, other in zip(actual, wanted, strict=True):
        close(one, other, tolerance)
    return actual, wanted


@pytest.mark.always
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_and_its_gradients_equal_the_definition(name):
    check(*CASES[name])


def test_rows_by_bands_and_whole_keys_give_the_same():
    """Gradients of queries are computed for bands of 128 rows in VMEM."""
    options = {**CAUSAL, "mask_self": True, "length_base": 5.0}
    check("v1", ODD, options, resident=8192, gradients=128 * 4 * 256 * 2)


def test_rows_may_stand_anywhere_among_the_keys():
    """Their first position may be a runtime value, as on a device of a mesh."""
    given = [jnp.asarray(x, jnp.float32) for x in arrays("softmax", PADDED)]
    options = {**CAUSAL, "runs": segments(300), "length_base": 5.0, **SMALL}

    @jax.jit
    def stretch(first, query, key, value):
        some = jax.lax.dynamic_slice_in_dim(query, first, 150, axis=1)
        return attend_in_tiles(some, key, value, first=first, **options)

    close(stretch(100, *given), attend_in_tiles(*given, **options)[:, 100:250], 1e-6)


def test_bfloat16_is_as_good_as_its_rounding():
    check("v1", PADDED, CAUSAL, 2**-6, jnp.bfloat16)


@pytest.mark.parametrize(
    "queries, keys, options",
    [
        (128, 256, {"mask": np.repeat([[True], [False]], 256, axis=1)}),
        (128, 512, {"window": (100, 0)}),
    ],
    ids=["an_example_without_keys", "keys_that_no_row_sees"],
)
def test_no_block_is_read_that_does_not_exist(queries, keys, options):
    """`STRICT` stops there, where a TPU would read beyond the array."""
    check("softmax", Sizes(queries, keys, 1, 1, 128, 128), options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask_self", [True, False])
@pytest.mark.parametrize("grown", [{}, {"length_base": 9.0}])
@pytest.mark.parametrize("keys", ["all", "padding", "runs", "causal", "window"])
def test_every_combination_of_options(kind, mask_self, grown, keys):
    own = {
        "all": {},
        "padding": {"mask": padding(PADDED)},
        "runs": {"runs": segments(300), "mask": holes(PADDED)},
        "causal": CAUSAL,
        "window": {"window": (130, 20)},
    }[keys]
    options = {**own, "mask_self": mask_self, **grown}
    check(kind, PADDED, options)


@pytest.mark.parametrize("dtype, passes", [(jnp.bfloat16, 1), (jnp.float32, 6)])
def test_the_kernels_declare_their_products(dtype, passes):
    """Two products per pair forward, five backward. A float32 product counts six
    times."""
    given = [jnp.ones((1, 128, 1, 128), dtype)] * 3
    gradient = jax.grad(
        lambda *given: attend_in_tiles(*given).sum(dtype=jnp.float32), (0, 1, 2)
    )
    declared = re.findall(r"flops=(\d+)", str(jax.make_jaxpr(gradient)(*given)))
    products = [int(x) / (2 * 128**3) for x in declared]
    assert sorted(products) == [0, 2 * passes, 5 * passes]


def test_the_future_and_rows_without_keys():
    """Later keys change no bit of a row. A row without keys is zero."""
    query, key, value = (np.asarray(x, np.float32) for x in arrays("softmax", PADDED))
    mask = np.ones((B, 300), bool)
    mask[0, :100] = False
    form = jax.jit(partial(attend_in_tiles, **CAUSAL, mask=mask, **SMALL))
    one = np.asarray(form(query, key, value))
    later = np.arange(300)[None, :, None, None] >= 250
    two = form(query, *(np.where(later, -3 * x, x) for x in (key, value)))
    same(one[:, :250], two[:, :250])
    assert np.abs(one[:, 250:] - two[:, 250:]).max() > 0.1
    same(one[0, :100], np.zeros_like(one[0, :100]))
    assert np.abs(one[0, 100:]).max(axis=(1, 2)).min() > 0


@pytest.mark.parametrize("queries, keys", [(37, 45), (45, 37), (16, 48), (48, 20)])
def test_blocks_that_are_visited_are_those_that_are_seen(queries, keys):
    """All visible blocks are visited; blocks without a mask are wholly visible.

    Without hidden keys and segments no other block is visited.
    """
    sizes = Sizes(queries, keys, 1, 1, 1, 1)
    rng = np.random.default_rng(queries)
    for window, hides, segmented, mask_self in (
        ((None, None), False, False, False),
        ((None, 0), False, False, False),
        ((9, 4), False, False, False),
        ((20, 0), False, False, False),
        ((None, 7), True, False, False),
        ((20, None), False, True, True),
        ((None, 0), True, True, False),
        ((13, 0), True, False, True),
    ):
        seen = {
            "mask": rng.random((B, keys)) < 0.7 if hides else None,
            "runs": np.cumsum(rng.random((B, keys)) < 0.1, axis=1),
            "mask_self": mask_self,
        }
        if not segmented or queries > keys:
            seen["runs"] = None
        pairs = pairs_of(sizes, window=window, **seen)[:, 0]
        exists, (left, right) = seen.pop("mask"), window
        found, count = seen_by_rows(
            *(queries, keys, keys - queries),
            **{"left": left, "right": right, "exists": exists, **seen},
        )
        same(np.broadcast_to(count, pairs.shape[:2]), pairs.sum(-1))
        tight = not hides and seen["runs"] is None and not mask_self
        check_blocks(pairs, found, keys, tight)
    none = np.zeros_like(pairs)
    nowhere = {"right": 0, "mask_self": False, "runs": None}
    hidden = seen_by_rows(queries, keys, 0, left=None, exists=none[:, 0], **nowhere)
    later = seen_by_rows(queries, keys, keys + 9, left=9, exists=None, **nowhere)
    for found, count in (hidden, later):
        same(count, np.zeros_like(count))
        check_blocks(none, found, keys, tight=True)


def check_blocks(pairs, seen, keys, tight, rows=8, size=4):
    """Check the blocks that a case visits.

    Outputs of rows after the last are dropped, but rows of zeros would take part in the
    gradients of keys.
    """
    for bounds, blocks in (
        (
            blocks_of_rows(seen, keys, rows, size),
            blocked(pairs, rows, size, "edge"),
        ),
        (
            blocks_of_keys(seen, keys, rows, size),
            blocked(pairs, rows, size, "constant").transpose(0, 2, 1, 3, 4),
        ),
    ):
        index = np.arange(blocks.shape[2])[None, None]
        first, start, stop, last = (
            np.broadcast_to(bounds[:, i, :, None], (B, blocks.shape[1], 1))
            for i in range(4)
        )
        assert (first < index.size).all() and (last <= index.size).all()
        visited = (index >= first) & (index < last)
        whole = (index >= start) & (index < stop)
        assert not (blocks.any(axis=(3, 4)) & ~visited).any()
        assert not (whole & ~blocks.all(axis=(3, 4))).any()
        if tight:
            same(visited, blocks.any(axis=(3, 4)))
            same(whole, blocks.all(axis=(3, 4)))


def blocked(pairs, rows, size, mode):
    """Return pairs as [B, row blocks, key blocks, rows, size], padded by hidden
    keys."""
    pairs = np.pad(pairs, [(0, 0), (0, -pairs.shape[1] % rows), (0, 0)], mode)
    pairs = np.pad(pairs, [(0, 0), (0, 0), (0, -pairs.shape[2] % size)])
    cut = pairs.reshape(B, pairs.shape[1] // rows, rows, -1, size)
    return cut.swapaxes(2, 3)
