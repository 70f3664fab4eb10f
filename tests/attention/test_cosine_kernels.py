"""The kernels of cosine attention equal the definition, interpreted on CPU."""

from functools import partial

import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest
from cosines import arrays, definition, far_from
from interpreted import STRICT, antiparallel, differentiated, seen_by
from laws import close, same

from symjax.attention.chunks import Tokens
from symjax.attention.cosine_fused import FusedCosine


def kernel(query, key, value, mask=None, segment_ids=None):
    tokens = Tokens(query, key, value, (), mask, segment_ids)
    return FusedCosine(interpret=STRICT).attend(tokens)


BOTH = "odd sizes, both"
CASES = {
    "two heads in a tile": ((256, 64, 64), ()),
    "four heads in a tile, a mask": ((200, 32, 32), ("mask",)),
    "a head of a tile, segments": ((256, 128, 256), ("segment_ids",)),
    BOTH: ((300, 16, 24), ("mask", "segment_ids")),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=[pytest.mark.always] if x == BOTH else []) for x in CASES],
)
def test_it_equals_the_definition(case):
    sizes, names = CASES[case]
    seen, given = seen_by(sizes[0], *names), arrays(*sizes)
    wanted = differentiated(partial(definition, **seen), given, np.float64)
    found = differentiated(partial(kernel, **seen), given)
    for one, exact in zip(found, wanted, strict=True):
        close(one, exact, 2e-6)


def test_bfloat16_inputs_cost_what_their_rounding_does():
    graded = partial(differentiated, given=[x[:1] for x in arrays(256, 64, 64)])
    laws.bfloat16_products_cost_what_rounded_inputs_do(graded, kernel, definition)


@pytest.mark.parametrize("spread", [0.1, 0.01])
def test_bfloat16_rows_that_are_nearly_antiparallel_lose_no_more(spread):
    """1 + cos down to 1e-4, of inputs whose cosines have three digits."""
    given = antiparallel(100, spread, heads=4)
    rounded = [x.astype(jnp.bfloat16) for x in given]
    wide = [x.astype(np.float64) for x in rounded]
    found = np.asarray(jax.jit(kernel)(*rounded), np.float64)
    close(found, definition(*wide, module=np), 2**-8)


def test_hidden_keys_may_be_anything_and_rows_without_keys_are_zero():
    seen, given = seen_by(300, "mask"), arrays(300, 16, 24)
    hidden = ~seen["mask"][:, 0, 0]
    bad = [x.copy() for x in given]
    bad[1][hidden], bad[2][hidden] = np.nan, np.inf
    form = partial(kernel, **seen)
    one, two = differentiated(form, given), differentiated(form, bad)
    for clean, found in zip(one, two, strict=True):
        same(found, clean)
    assert not one[0][0, :140].any() and np.abs(one[0][0, 150:]).min() > 0
    assert not one[2][hidden].any() and not one[3][hidden].any()


def test_a_nearly_antiparallel_key_in_the_state_is_its_value():
    (query, key, value), form, _ = far_from(kernel, 1, 0.001)
    output = jax.jit(form)(query, key, value)
    close(output[:, 128:], np.repeat(value[:, :1], 72, axis=1), 1e-6)


def test_a_state_of_keys_that_all_point_away_gives_the_mean_of_their_values():
    """And its gradient is that of as small a weight as can be told from none."""
    (_, key, value), form, _ = far_from(kernel, 100, 0.001)
    key = np.broadcast_to(10 * key[:, :1], key.shape)
    output, *gradients = differentiated(form, (-key, key, value))
    assert not output[:, :128].any()
    mean = value[:, :100].mean(axis=1, keepdims=True)
    close(output[:, 128:], np.repeat(mean, 72, axis=1), 1e-6)
    assert all(np.isfinite(x).all() for x in gradients)
    assert not gradients[0].any() and gradients[2][:, :100].any()


def test_rows_near_the_direction_away_from_a_state_lose_what_rounding_takes():
    """A weight is off by ε, so that the output is by ε / (1 + cos)."""
    given, form, exact = far_from(kernel, 100, 0.1)
    wide = [x.astype(np.float64) for x in given]
    close(jax.jit(form)(*given), exact(*wide, module=np), 1e-4)
