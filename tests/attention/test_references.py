"""The code in the docstring of each mechanism's file computes the mechanism."""

import inspect
import re
from importlib import import_module
from textwrap import dedent

import jax
import numpy as np
import pytest
from laws import close

from symjax import attention as A

T, H, V, M = 11, 4, 3, 6


def draw(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape)


Q, K, VALUE = draw(T, H, seed=0), draw(T, H, seed=1), draw(T, V, seed=2)
LQ, LK, W = draw(T, H, seed=3), draw(T, H, seed=4), draw(M, H, seed=5)
G, BETA = -np.abs(draw(T, seed=6)), np.random.default_rng(7).uniform(0, 2, T)
METRIC = draw(H, H, seed=8)
UNIT = K / np.linalg.norm(K, axis=-1, keepdims=True)
# File → arguments of its code, the public function and its arguments.
CASES = {
    "softmax": (
        (Q, K, VALUE),
        lambda heads: A.softmax(*heads(Q, K, VALUE), is_causal=True),
    ),
    "differential": (
        (np.stack([Q, LQ]), np.stack([K, LK]), VALUE, 0.4),
        lambda heads: A.differential(
            *(np.concatenate(heads(*x), axis=2) for x in ((Q, LQ), (K, LK))),
            *heads(VALUE),
            0.4,
            is_causal=True,
        ),
    ),
    "symmetric": (
        (Q, VALUE, METRIC),
        lambda heads: A.symmetric(*heads(Q, VALUE), metric=METRIC[None]),
    ),
    "gau": ((Q, K, VALUE, 5.0), lambda heads: A.gau(*heads(Q, K, VALUE), divisor=5.0)),
    "sparse": ((Q, K, VALUE), lambda heads: A.sparsemax(*heads(Q, K, VALUE))),
    "linear": (
        (Q, K, VALUE, lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))),
        lambda heads: A.linear_causal(*heads(Q, K, VALUE)),
    ),
    "cosine": ((Q, K, VALUE), lambda heads: A.cosine_causal(*heads(Q, K, VALUE))),
    "performer": (
        (Q, K, VALUE, W),
        lambda heads: A.performer_causal(*heads(Q, K, VALUE), W),
    ),
    "recurrent.normalised": (
        (Q @ W.T, K @ W.T - (K * K).sum(axis=-1, keepdims=True) / 2, VALUE),
        lambda heads: A.performer_causal(*heads(Q, K, VALUE), W, scale=1.0),
    ),
    "gated_linear": (
        (Q, K, VALUE, G),
        lambda heads: A.decay_causal(*heads(Q, K, VALUE), G[None, :, None]),
    ),
    "delta_rule": (
        (Q, UNIT, VALUE, BETA, G),
        lambda heads: A.delta_causal(
            *heads(Q, UNIT, VALUE), BETA[None, :, None], G[None, :, None]
        ),
    ),
    "flash": (
        (Q, K, LQ, LK, VALUE, 4),
        lambda heads: A.flash_causal(*heads(Q, K, LQ, LK, VALUE), group_size=4),
    ),
    "matrix_function": (
        (Q, VALUE, np.exp),
        lambda heads: A.matrix_function(*heads(Q, VALUE), "exp"),
    ),
    "causal_matrix_function": (
        (Q, VALUE, np.exp, 0.1),
        lambda heads: A.matrix_function_causal(*heads(Q, VALUE), "exp", scale=0.1),
    ),
    "mesa_layer": (
        (Q, K, VALUE, 0.7),
        lambda heads: A.mesa_causal(*heads(Q, K, VALUE), ridge=0.7),
    ),
    "softpick": ((Q, K, VALUE), lambda heads: A.softpick(*heads(Q, K, VALUE))),
}


def code_of(file):
    """Compile the function in the docstring of a file of symjax.attention."""
    module = import_module(f"symjax.attention.{file}")
    block = re.search(r"\n\n((?:    .*\n)+)", module.__doc__)
    names = {"np": np}
    exec(dedent(block.group(1)), names)
    (function,) = (x for name, x in names.items() if inspect.isfunction(x))
    return function


@pytest.mark.parametrize("file", CASES)
def test_the_code_of_a_docstring_is_the_mechanism(file):
    arguments, public = CASES[file]
    with jax.enable_x64(True):
        found = public(lambda *arrays: [x[None, :, None] for x in arrays])
    close(np.asarray(found)[0, :, 0], code_of(file)(*arguments), 2e-6)
