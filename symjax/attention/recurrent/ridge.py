"""Ridge regression of values on keys, as a recurrence: the Mesa layer and resolvents.

With M = Σ k kᵀ, S = Σ k vᵀ and P = (I + βM)⁻¹, the regression is W = β P S. The state
is W and a root F of P = F Fᵀ. One token changes W as in recursive least squares and F
by Potter's formula (Bierman 1977, Factorization Methods for Discrete Sequential
Estimation):

    f = Fᵀ k,  z = F f,  d = 1 + β f·f,  W += (β/d) z (v − k W),  F −= β/(√d + d) z fᵀ

A chunk makes all updates of its tokens with one factorisation: G = I + β K P Kᵀ = L
diag(D) Lᵀ, Z = L⁻¹ K P, E = diag(1/D) L⁻¹ (V − K W). The rows of Z are the z of the
tokens, and those of E are the errors of the regression after each token has been read.

The state has F and not P, since an update of P subtracts nearly equal matrices if β k·k
is large. F loses half as many digits as P.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from symjax.attention.core.products import einsum, over_root, products
from symjax.attention.recurrent.chunks import (
    Chunk,
    Span,
    chunk_of,
    past_pairs,
    product_and_arrays,
    through_segments,
    time_first,
)
from symjax.attention.recurrent.recurrence import Schedule
from symjax.attention.recurrent.triangular import (
    root_of_inverse,
    solve_unit_lower,
    unit_factor,
)


class MesaState(NamedTuple):
    """State of a ridge regression, in float32 at least."""

    fit: Float[Array, "B K H V"]  # W = β P S, the regression of all values so far
    root: Float[Array, "B K H H"]  # F, with F Fᵀ = P = (I + βM)⁻¹


class PreparedMesa(NamedTuple):
    """A chunk and β."""

    chunk: Chunk
    strength: Float[Array, ""]


class TokenUpdates(NamedTuple):
    """Changes of the regression by each token of a chunk.

    Attributes:
        reaches_rows: the rows [B 1 T 1] that read the state before the chunk; None:
            all.
        changes: Z, the product of each key with P before the token.
        root_changes: f / (1 + √d), with f the product of each key with F before the
            token.
        pivots: D, 1 + β kᵀ P k with P before the token.
        errors: E, the errors of the regression after the token.
    """

    reaches_rows: Bool[Array, "B 1 T 1"] | None
    changes: Float[Array, "B K T H"]
    root_changes: Float[Array, "B K T H"]
    pivots: Float[Array, "B K T"]
    errors: Float[Array, "B K T V"]


@dataclass(frozen=True)
class Mesa:
    """Recurrence of a ridge regression. β is its only parameter.

    Attributes:
        output: the result of a row. "read": q W. If queries are equal to keys, also
            "error", v − q W, or "change", −q W, with W after the token has been read.
        unit_rows: divide every row of the matrix that multiplies the values by its
            Euclidean norm. Only for "error" and "change".
    """

    kernel = None
    output: str = "read"
    unit_rows: bool = False

    def schedule(self) -> Schedule:
        # `effect` and `merge` factorise matrices [H H].
        return Schedule(only_as_batch=True)

    def empty(self, parameters: Any, sizes: tuple, dtype: Any) -> MesaState:
        dtype = jnp.promote_types(dtype, jnp.float32)
        batch, heads, size, _ = sizes
        identity = jnp.eye(size, dtype=dtype)[None, None]
        root = jnp.broadcast_to(identity, (batch, heads, size, size))
        return MesaState(jnp.zeros(sizes, dtype), root)

    def prepare(self, parameters: Array, span: Span) -> PreparedMesa:
        return PreparedMesa(chunk_of(span), parameters)

    def advance(
        self, state: MesaState, prepared: PreparedMesa
    ) -> tuple[MesaState, Float[Array, "B T K G V"]]:
        chunk, strength = prepared
        _, query, key, value = product_and_arrays(chunk)
        product = products(*chunk[:3], cancel=True)
        empty = self.empty(None, state.fit.shape, state.fit.dtype)
        before, carried, reaches, joins = through_segments(chunk, state, empty)
        reach = None if reaches is None else reaches[:, None, :, None]
        updates = _updates(before, prepared, reach)
        written = strength * updates.changes
        if joins is not None:
            written = jnp.where(joins[:, None, :, None], written, 0)
        scaled = written / jnp.sqrt(updates.pivots)[..., None]
        after = MesaState(
            carried.fit + product("bkth,bktv->bkhv", written, updates.errors),
            carried.root - product("bkth,bkti->bkhi", scaled, updates.root_changes),
        )
        if self.output == "read":
            rows = _read(before, prepared, query, updates)
        else:
            rows = self._errors(key, value, strength, updates)[:, :, None]
        return after, time_first(rows)

    def _errors(
        self, key: Array, value: Array, strength: Array, updates: TokenUpdates
    ) -> Float[Array, "B K T V"]:
        """Return the rows for queries equal to keys.

        The row of token t has the entries δ_ts − β x·k_s with x = P k_t, or −β x·k_s
        for "change". Since β M x = k_t − x, the sum of the squares of the entries is
        1 − β x·(k_t + x), or β x·(k_t − x).
        """
        change = self.output == "change"
        rows = updates.errors - (value if change else 0)
        if not self.unit_rows:
            return rows
        x = updates.changes / updates.pivots[..., None]
        squares = strength * (x * (key - x if change else key + x)).sum(axis=-1)
        return over_root(rows, (squares if change else 1 - squares)[..., None])

    def effect(
        self, prepared: PreparedMesa
    ) -> tuple[MesaState, tuple[Float[Array, "B K H H"], Float[Array, "B K H V"]]]:
        """Return the state that the chunk makes of an empty one, and its βM and βS."""
        chunk, strength = prepared
        _, _, key, value = product_and_arrays(chunk)
        product = products(*chunk[:3], cancel=True)
        moments = strength * product("bkth,bkti->bkhi", key, key)
        sums = strength * product("bkth,bktv->bkhv", key, value)
        empty = self.empty(None, sums.shape, sums.dtype)
        return _with_sums(empty, moments, sums), (moments, sums)

    def merge(self, one: tuple, two: tuple) -> tuple[MesaState, tuple]:
        """Return the effect of two spans: βM and βS add up."""
        sums = tuple(x + y for x, y in zip(one[1], two[1], strict=True))
        return _with_sums(one[0], *two[1]), sums


def _with_sums(
    state: MesaState, moments: Float[Array, "B K H H"], sums: Float[Array, "B K H V"]
) -> MesaState:
    """Return the state after tokens with these βM and βS.

    P becomes F (I + Fᵀ βM F)⁻¹ Fᵀ, and W grows by P (βS − βM W).
    """
    identity = jnp.eye(moments.shape[-1], dtype=moments.dtype)[None, None]
    inner = einsum("bkih,bkij,bkjl->bkhl", state.root, moments, state.root)
    root = einsum("bkhi,bkij->bkhj", state.root, root_of_inverse(identity + inner))
    errors = sums - einsum("bkhi,bkiv->bkhv", moments, state.fit)
    return MesaState(
        state.fit + einsum("bkhi,bkji,bkjv->bkhv", root, root, errors), root
    )


def _updates(
    before: MesaState, prepared: PreparedMesa, reach: Bool[Array, "B 1 T 1"] | None
) -> TokenUpdates:
    """Return the changes of the regression by the tokens of a chunk."""
    chunk, strength = prepared
    _, _, key, value = product_and_arrays(chunk)
    product = products(*chunk[:3], cancel=True)
    by_root = product("bkth,bkhi->bkti", key, before.root)
    by_inverse = product("bkti,bkhi->bkth", by_root, before.root)
    predicted = product("bkth,bkhv->bktv", key, before.fit)
    if reach is not None:
        by_root, by_inverse = (jnp.where(reach, x, key) for x in (by_root, by_inverse))
        predicted = jnp.where(reach, predicted, 0)
    gram = product("bkth,bksh->bkts", by_root, by_root)
    if chunk.segment is not None:
        same = chunk.segment[:, :, None] == chunk.segment[:, None, :]
        gram = jnp.where(same[:, None], gram, 0)
    identity = jnp.eye(key.shape[2], dtype=key.dtype)[None, None]
    pivots, inverse = unit_factor(identity + strength * gram)
    changes, by_root = (
        product("bkts,bksh->bkth", inverse, rows) for rows in (by_inverse, by_root)
    )
    errors = product("bkts,bksv->bktv", inverse, value - predicted)
    divisor = 1 + jnp.sqrt(pivots)[..., None]
    root_changes = solve_unit_lower(inverse / divisor, by_root / divisor, product)
    errors = errors / pivots[..., None]
    return TokenUpdates(reach, changes, root_changes, pivots, errors)


def _read(
    before: MesaState,
    prepared: PreparedMesa,
    query: Float[Array, "B K G T H"],
    updates: TokenUpdates,
) -> Float[Array, "B K G T V"]:
    """Return q W of every query: linear attention over changes and errors."""
    chunk, strength = prepared
    product = products(*chunk[:3], cancel=True)
    past = product("bkgth,bkhv->bkgtv", query, before.fit)
    if updates.reaches_rows is not None:
        past = jnp.where(updates.reaches_rows[:, :, None], past, 0)
    weights = strength * product("bkgth,bksh->bkgts", query, updates.changes)
    weights = jnp.where(past_pairs(chunk)[:, None, None], weights, 0)
    return past + product("bkgts,bksv->bkgtv", weights, updates.errors)
