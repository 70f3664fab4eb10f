"""Ridge regression of values on keys, as a recurrence: the Mesa layer and resolvents.

With M = Σ k kᵀ, S = Σ k vᵀ and P = (I + βM)⁻¹, the regression is W = β P S. The state
is W and a root F of P = F Fᵀ. One token changes W as in recursive least squares and F
by Potter's formula (Bierman 1977, Factorization Methods for Discrete Sequential
Estimation):

    f = Fᵀ k,  z = F f,  d = 1 + β f·f,  W += (β/d) z (v − k W),  F −= β/(√d + d) z fᵀ

A chunk does it for all of its tokens with one factorisation: G = I + β K P Kᵀ = L
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


class Learned(NamedTuple):
    """Results of reading a chunk's tokens into the state before the chunk.

    Attributes:
        reach: which rows [B 1 T 1] read the state before the chunk, or None: all.
        changes: Z, the product of each key with P before the token.
        seen: f / (1 + √d), the product of each key with F before the token, scaled.
        sizes: D, 1 + β kᵀ P k with P before the token.
        errors: E, the errors of the regression after the token.
    """

    reach: Bool[Array, "B 1 T 1"] | None
    changes: Float[Array, "B K T H"]
    seen: Float[Array, "B K T H"]
    sizes: Float[Array, "B K T"]
    errors: Float[Array, "B K T V"]


@dataclass(frozen=True)
class Mesa:
    """Recurrence of a ridge regression. β is its only parameter.

    Attributes:
        output: what a row is. "read": q W. For queries equal to keys, the error of the
            value after it has been read, v − q W ("error"), or −q W ("change").
        unit_rows: divide every row of the matrix that multiplies the values by its
            length. Only for "error" and "change".
    """

    kernel = None
    output: str = "read"
    unit_rows: bool = False

    def schedule(self) -> Schedule:
        # `effect` and `merge` factorise matrices [H H].
        return Schedule(on_one_gpu_only=True)

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
        learned = _learn(before, prepared, reach)
        written = strength * learned.changes
        if joins is not None:
            written = jnp.where(joins[:, None, :, None], written, 0)
        over_sizes = written / jnp.sqrt(learned.sizes)[..., None]
        after = MesaState(
            carried.fit + product("bkth,bktv->bkhv", written, learned.errors),
            carried.root - product("bkth,bkti->bkhi", over_sizes, learned.seen),
        )
        if self.output == "read":
            rows = _read(before, prepared, query, learned)
        else:
            rows = self._errors(key, value, strength, learned)[:, :, None]
        return after, time_first(rows)

    def _errors(
        self, key: Array, value: Array, strength: Array, learned: Learned
    ) -> Float[Array, "B K T V"]:
        """Return the rows for queries equal to keys.

        The row of token t has the entries δ_ts − β x·k_s with x = P k_t, for "change"
        without δ. Since β M x = k_t − x, the sum of their squares is 1 − β x·(k_t + x),
        or β x·(k_t − x).
        """
        change = self.output == "change"
        rows = learned.errors - (value if change else 0)
        if not self.unit_rows:
            return rows
        x = learned.changes / learned.sizes[..., None]
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


def _learn(
    before: MesaState, prepared: PreparedMesa, reach: Bool[Array, "B 1 T 1"] | None
) -> Learned:
    """Read the tokens of a chunk into the regression."""
    chunk, strength = prepared
    _, _, key, value = product_and_arrays(chunk)
    product = products(*chunk[:3], cancel=True)
    seen = product("bkth,bkhi->bkti", key, before.root)
    readers = product("bkti,bkhi->bkth", seen, before.root)
    held = product("bkth,bkhv->bktv", key, before.fit)
    if reach is not None:
        seen, readers = (jnp.where(reach, x, key) for x in (seen, readers))
        held = jnp.where(reach, held, 0)
    gram = product("bkth,bksh->bkts", seen, seen)
    if chunk.segment is not None:
        same = chunk.segment[:, :, None] == chunk.segment[:, None, :]
        gram = jnp.where(same[:, None], gram, 0)
    identity = jnp.eye(key.shape[2], dtype=key.dtype)[None, None]
    sizes, solve = unit_factor(identity + strength * gram)
    changes, seen = (
        product("bkts,bksh->bkth", solve, rows) for rows in (readers, seen)
    )
    errors = product("bkts,bksv->bktv", solve, value - held)
    wide = 1 + jnp.sqrt(sizes)[..., None]
    seen = solve_unit_lower(solve / wide, seen / wide, product)
    return Learned(reach, changes, seen, sizes, errors / sizes[..., None])


def _read(
    before: MesaState,
    prepared: PreparedMesa,
    query: Float[Array, "B K G T H"],
    learned: Learned,
) -> Float[Array, "B K G T V"]:
    """Return q W of every query: linear attention over changes and errors."""
    chunk, strength = prepared
    product = products(*chunk[:3], cancel=True)
    past = product("bkgth,bkhv->bkgtv", query, before.fit)
    if learned.reach is not None:
        past = jnp.where(learned.reach[:, :, None], past, 0)
    weights = strength * product("bkgth,bksh->bkgts", query, learned.changes)
    weights = jnp.where(past_pairs(chunk)[:, None, None], weights, 0)
    return past + product("bkgts,bksv->bkgtv", weights, learned.errors)
