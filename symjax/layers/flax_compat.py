"""Mechanisms of symjax inside Flax's own attention layers, of NNX and of Linen.

Masks may be boolean or float32, as Flax makes them. Score mechanisms take any mask. For
mechanisms with features a mask may hide keys and rows, as `make_attention_mask` does
for padding; causality is the option `is_causal`.

A single query is a decoding step: it sees all keys in Flax's cache that its mask shows,
and costs O(S) for S keys, also with a recurrence. A row that sees no key gives zeros.
Flax's softmax gives the mean of all values for such a row.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float

from symjax import attention
from symjax.attention import Mechanism, ScoreMechanism
from symjax.attention.core.arguments import check_choice, check_count, check_positive


def attention_fn(
    mechanism: str, *, is_causal: bool = False, **options: Any
) -> Callable[..., Array]:
    """Return a mechanism as the `attention_fn` of a Flax layer, in place of softmax.

    Pass it as `nnx.MultiHeadAttention(…, attention_fn=attention_fn("cosine"))`, or to
    Linen's `nn.MultiHeadDotProductAttention`. Arrays may have any axes before [T N H],
    and fewer key/value heads than query heads. The layer's `dtype` and `precision`
    apply, except to products that need the highest precision. Sums run in float32 at
    least, with or without `force_fp32_for_softmax`.

    Args:
        is_causal: a token sees itself and earlier tokens. An NNX layer's call has the
            same option.
        options: options of the mechanism, such as features or length_base.
    Raises:
        ValueError: an unknown mechanism or option, a value that the option cannot
            have, or a mechanism that needs an array which Flax's layers do not have.
            The returned function raises on dropout of weights, on storing them
            (`sow_weights`), on Linen's own einsums, on masks and biases that the
            mechanism cannot apply, and on causality unless there are as many queries as
            keys, or one query.
    """
    form = _form(mechanism, options)
    causal = is_causal

    def attend(
        query: Float[Array, "*B T N H"],
        key: Float[Array, "*B S K H"],
        value: Float[Array, "*B S K V"],
        bias: Float[Array, "*#B #N #T #S"] | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Callable | None = None,
        attn_weights_value_einsum: Callable | None = None,
    ) -> Float[Array, "*B T N V"]:
        # All arguments are named: Linen silently drops those that are not.
        _refuse_uses_of_weights(
            mechanism,
            {
                f"dropout_rate {dropout_rate}": dropout_rate > 0 and not deterministic,
                "sow_weights": module is not None,
                "qk_attn_weights_einsum": qk_attn_weights_einsum is not None,
                "attn_weights_value_einsum": attn_weights_value_einsum is not None,
            },
        )
        batch = _batch(query, key, value)
        if dtype is None:
            dtype = jnp.result_type(query, key, value)
        query, key, value = (_flat(x, batch).astype(dtype) for x in (query, key, value))
        mask, bias = _pairs("mask", mask, batch), _pairs("bias", bias, batch)
        is_causal = (causal or is_causal) and query.shape[1] > 1
        if is_causal and query.shape[1] != key.shape[1]:
            raise ValueError(
                "attention_fn: is_causal needs as many queries as keys, or one query, "
                f"got {query.shape[1]} and {key.shape[1]}: give a mask instead"
            )
        scored = isinstance(form.attend, ScoreMechanism)
        run = _attend_scores if scored else _attend_features
        with _matmul_precision(precision):
            mixed = run(mechanism, options, (query, key, value), bias, mask, is_causal)
        return mixed.reshape(*batch, *mixed.shape[1:])

    return attend


def _refuse_uses_of_weights(mechanism: str, uses: dict[str, bool]) -> None:
    """Raise if the layer wants to read or change attention weights."""
    for name, wanted in uses.items():
        if wanted:
            raise ValueError(
                f"attention_fn: {name} acts on the map of weights, which {mechanism} "
                "does not return"
            )


def _form(mechanism: str, options: dict[str, Any]) -> Mechanism:
    """Return the entry of a mechanism that a Flax layer can call with these options.

    Raises:
        ValueError: an unknown mechanism or option, or a mechanism that needs an array
            which Flax's layers do not have.
    """
    table = {
        name: form
        for name, form in attention.MECHANISMS.items()
        if form.keys and not form.gated
    }
    if mechanism not in table:
        raise ValueError(
            f"attention_fn: mechanism {mechanism!r} is unknown: choose from "
            f"{', '.join(table)}"
        )
    form = table[mechanism]
    if form.required:
        raise ValueError(
            f"attention_fn: {mechanism} needs {', '.join(form.required)}, which Flax's "
            "layers do not have: use symjax.layers.Attention"
        )
    known = {*form.options, *form.declared, *form.operands}
    known -= {"bias"}  # an argument of the call
    for name in options:
        if name not in known:
            raise ValueError(
                f"attention_fn: {mechanism} has no option {name!r}: choose from "
                f"{', '.join(sorted(known))}"
            )
    _check_options(mechanism, options)
    return form


def _check_options(mechanism: str, options: dict[str, Any]) -> None:
    """Check values that a mechanism would refuse in every call.

    Arrays and functions may depend on the size of heads, so only a call checks them.

    Raises:
        ValueError: a value is unknown or out of its range, naming the option.
    """
    form, who = attention.MECHANISMS[mechanism], f"attention_fn: {mechanism}"
    plain: dict[str, Any] = {
        name: x for name, x in options.items() if isinstance(x, str | int | float)
    }
    if isinstance(form.attend, ScoreMechanism):
        nothing = jnp.zeros((1, 0, 1, 1))  # checked like any arrays; computes nothing
        form.attend(nothing, nothing, nothing, **plain)
        return
    for name, value in plain.items():
        if name in form.choices:
            check_choice(who, name, value, form.choices[name])
        elif name in form.declared:
            form.declared[name].checked(f"{who}: {name}", value)
        elif name == "chunk_size":
            check_count(who, name, value)
        elif name == "scale":
            check_positive(who, name, value)


def _attend_scores(
    mechanism: str,
    options: dict[str, Any],
    arrays: tuple[Array, Array, Array],
    bias: Array | None,
    mask: Array | None,
    is_causal: bool,
) -> Array:
    """Call a score mechanism: mask and bias may differ by pair."""
    queries, keys = (x.shape[1] for x in arrays[:2])
    for name in ("mask_self", "window"):
        if options.get(name) and queries != keys:
            raise ValueError(
                f"attention_fn: {name} needs the position of queries among keys, got "
                f"{queries} queries and {keys} keys"
            )
    attend = attention.MECHANISMS[mechanism].attend
    return attend(*arrays, bias, mask, is_causal=is_causal, **options)


def _attend_features(
    mechanism: str,
    options: dict[str, Any],
    arrays: tuple[Array, Array, Array],
    bias: Array | None,
    mask: Array | None,
    is_causal: bool,
) -> Array:
    """Call a feature mechanism: bidirectional, causal, or one query for all keys."""
    form = attention.MECHANISMS[mechanism]
    if bias is not None:
        raise ValueError(
            f"attention_fn: bias {bias.shape} is added to scores of pairs, which "
            f"{mechanism} does not form"
        )
    rows = None
    if mask is not None:
        mask, rows = _keys_and_rows(mechanism, mask)
    function = form.causal if is_causal else form.attend
    if function is None:
        raise ValueError(f"attention_fn: {mechanism} has no causal form")
    if not is_causal:
        options = {name: x for name, x in options.items() if name != "chunk_size"}
    mixed = function(*arrays, mask=mask, **options)
    if rows is None:
        return mixed
    return jnp.where(rows == 0, 0, mixed * rows.astype(mixed.dtype))


def _keys_and_rows(mechanism: str, mask: Array) -> tuple[Array, Array | None]:
    """Split a mask of pairs into visible keys, and rows that see any key.

    Flax's padding masks are products of both. Other masks, such as causal ones, raise.
    Under `jax.jit` the values of a mask are not known: such masks make the output NaN.

    Returns:
        visible keys [#B 1 1 S], and factors of the rows [#B T 1 1] (1, 0 or NaN), or
        None if all are 1.
    """
    if mask.shape[1:3] == (1, 1):
        return mask, None
    keys, rows = (mask.any(axis=axis, keepdims=True) for axis in (2, 3))
    product = (mask == (keys & rows)).all(axis=(1, 2, 3))
    is_concrete = not isinstance(product, Tracer)
    if mask.shape[1] > 1 or (is_concrete and not product.all()):
        raise ValueError(
            f"attention_fn: a mask of {mechanism} may only hide keys, (batch, 1, 1, "
            f"{mask.shape[3]}), or rows and keys, got {mask.shape} that hides single "
            f"pairs: for causality use attention_fn({mechanism!r}, is_causal=True)"
        )
    rows = jnp.where(product[:, None, None, None], rows, jnp.nan)
    return keys, jnp.swapaxes(rows, 1, 2)


def _batch(*arrays: Array) -> tuple[int, ...]:
    """Return the axes before [T N H], which all arrays must share."""
    shapes = [x.shape for x in arrays]
    if len({shape[:-3] for shape in shapes}) > 1 or min(map(len, shapes)) < 3:
        raise ValueError(
            "attention_fn: query, key and value must be [*batch, time, heads, size] "
            f"with one batch, got {', '.join(map(str, shapes))}"
        )
    return shapes[0][:-3]


def _flat(x: Array, batch: tuple[int, ...]) -> Array:
    """Reshape [*B, …] to [B, …], with the last three axes kept."""
    return x.reshape(math.prod(batch), *x.shape[-3:])


def _pairs(name: str, pairs: Array | None, batch: tuple[int, ...]) -> Array | None:
    """Reshape a mask or bias [*#B #N #T #S] to [#B #N #T #S]; masks become boolean."""
    if pairs is None:
        return None
    missing = len(batch) + 3 - pairs.ndim
    padded = pairs.reshape((1,) * missing + pairs.shape)
    axes = padded.shape[:-3]
    if missing < 0 or any(x not in (1, y) for x, y in zip(axes, batch, strict=False)):
        raise ValueError(
            f"attention_fn: {name} must be [*batch, heads, queries, keys] for batch "
            f"{batch}, got {pairs.shape}"
        )
    if any(size > 1 for size in axes):
        padded = _flat(jnp.broadcast_to(padded, (*batch, *padded.shape[-3:])), batch)
    else:
        padded = padded.reshape(1, *padded.shape[-3:])
    return padded.astype(bool) if name == "mask" else padded


def _matmul_precision(precision: Any) -> contextlib.AbstractContextManager:
    """Return a context in which matrix products have the precision of a Flax layer."""
    if precision is None:
        return contextlib.nullcontext()
    both = precision if isinstance(precision, tuple) else (precision, precision)
    if both[0] != both[1]:
        raise ValueError(
            f"attention_fn: precision must be equal for both operands, got {precision}"
        )
    name = getattr(both[0], "name", both[0])
    if isinstance(both[0], jax.lax.Precision):
        name = name.lower()
    return jax.default_matmul_precision(name)
