"""Attention mechanisms as pure functions of arrays.

Shapes use the alphabet of `jax.nn.dot_product_attention`: B batch, T query length,
S key length, N heads, K key/value heads, H head size, V value size, M features.
"""

from symjax.attention.differential import (
    differential,
    differential_lambda,
    lambda_initial,
)
from symjax.attention.mechanisms import MECHANISMS, Mechanism
from symjax.attention.positions import rotate
from symjax.attention.softmax import softmax
from symjax.attention.symmetric import symmetric, symmetric_key

__all__ = [
    "MECHANISMS",
    "Mechanism",
    "differential",
    "differential_lambda",
    "lambda_initial",
    "rotate",
    "softmax",
    "symmetric",
    "symmetric_key",
]
