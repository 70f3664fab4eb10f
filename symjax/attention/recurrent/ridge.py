"""Ridge regression of values on keys, as a recurrence: the Mesa layer and resolvents.

The state is P = (I + βM)⁻¹ and S, with M = Σ k kᵀ and S = Σ k vᵀ. One token changes P
by the formula of Sherman and Morrison. A chunk does it for all of its tokens with one
factorisation: G = I + β K P Kᵀ = L diag(D) Lᵀ, Z = L⁻¹ K P, E = diag(1/D) L⁻¹ (V − β K
P S). The rows of Z are the directions in which the tokens change P, and those of E are
the errors of the regression after each token has been read.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from symjax.attention.core.products import over_root, products
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
from symjax.attention.recurrent.triangular import inverse_of_positive, unit_factor


class MesaState(NamedTuple):
    """State of a ridge regression, in float32 at least."""

    sums: Float[Array, "B K H V"]  # S = Σ k vᵀ
    inverse: Float[Array, "B K H H"]  # P = (I + βM)⁻¹


class PreparedMesa(NamedTuple):
    """A chunk and β."""

    chunk: Chunk
    strength: Float[Array, ""]


class Learned(NamedTuple):
    """Results of a chunk's tokens, in turn, from the state before the chunk.

    Attributes:
        reach: which rows [B 1 T 1] read the state before the chunk, or None: all.
        readers: K P of the state before the chunk, or K for the other rows.
        changes: Z, the product of each key with P before the token.
        sizes: D, 1 + β kᵀ P k with P before the token.
        errors: E, the errors of the regression after the token.
    """

    reach: Bool[Array, "B 1 T 1"] | None
    changes: Float[Array, "B K T H"]
    sizes: Float[Array, "B K T"]
    errors: Float[Array, "B K T V"]


@dataclass(frozen=True)
class Mesa:
    """Recurrence of a ridge regression. β is its only parameter.

    Attributes:
        output: what a row is. "read": β q P S. For queries equal to keys, the error of
            the value after it has been read, v − β q P S ("error"), or the error minus
            the value, −β q P S ("change").
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
        inverse = jnp.broadcast_to(identity, (batch, heads, size, size))
        return MesaState(jnp.zeros(sizes, dtype), inverse)

    def prepare(self, parameters: Array, span: Span) -> PreparedMesa:
        return PreparedMesa(chunk_of(span), parameters)

    def advance(
        self, state: MesaState, prepared: PreparedMesa
    ) -> tuple[MesaState, Float[Array, "B T K G V"]]:
        chunk, strength = prepared
        _, query, key, value = product_and_arrays(chunk)
        product = products(*chunk[:3], cancel=True)
        empty = self.empty(None, state.sums.shape, state.sums.dtype)
        before, carried, reaches, joins = through_segments(chunk, state, empty)
        reach = None if reaches is None else reaches[:, None, :, None]
        learned = _learn(before, prepared, reach)
        written, changes = key, learned.changes
        if joins is not None:
            join = joins[:, None, :, None]
            written, changes = (jnp.where(join, x, 0) for x in (written, changes))
        scaled = changes * (strength / learned.sizes)[..., None]
        after = MesaState(
            carried.sums + product("bkth,bktv->bkhv", written, value),
            carried.inverse - product("bkth,bkti->bkhi", scaled, changes),
        )
        if self.output == "read":
            rows = _read(before, chunk, query, learned) * strength
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
    ) -> tuple[MesaState, Float[Array, "B K H H"]]:
        """Return the state that the chunk makes of an empty one, and its βM."""
        chunk, strength = prepared
        _, _, key, value = product_and_arrays(chunk)
        product = products(*chunk[:3], cancel=True)
        moments = strength * product("bkth,bkti->bkhi", key, key)
        identity = jnp.eye(key.shape[-1], dtype=key.dtype)[None, None]
        sums = product("bkth,bktv->bkhv", key, value)
        return MesaState(sums, inverse_of_positive(identity + moments)), moments

    def merge(self, one: tuple, two: tuple) -> tuple[MesaState, Array]:
        """Return the effect of two spans: βM and S add up, and P⁻¹ = I + βM."""
        inverse = inverse_of_positive(inverse_of_positive(one[0].inverse) + two[1])
        return MesaState(one[0].sums + two[0].sums, inverse), one[1] + two[1]


def _learn(
    before: MesaState, prepared: PreparedMesa, reach: Bool[Array, "B 1 T 1"] | None
) -> Learned:
    """Read the tokens of a chunk into the regression."""
    chunk, strength = prepared
    _, _, key, value = product_and_arrays(chunk)
    product = products(*chunk[:3], cancel=True)
    readers = product("bkth,bkhi->bkti", key, before.inverse)
    held = product("bkth,bkhv->bktv", readers, before.sums)
    if reach is not None:
        readers, held = jnp.where(reach, readers, key), jnp.where(reach, held, 0)
    gram = product("bkth,bksh->bkts", readers, key)
    if chunk.segment is not None:
        same = chunk.segment[:, :, None] == chunk.segment[:, None, :]
        gram = jnp.where(same[:, None], gram, 0)
    identity = jnp.eye(key.shape[2], dtype=key.dtype)[None, None]
    sizes, solve = unit_factor(identity + strength * gram)
    changes = product("bkts,bksh->bkth", solve, readers)
    errors = product("bkts,bksv->bktv", solve, value - strength * held)
    return Learned(reach, changes, sizes, errors / sizes[..., None])


def _read(
    before: MesaState,
    chunk: Chunk,
    query: Float[Array, "B K G T H"],
    learned: Learned,
) -> Float[Array, "B K G T V"]:
    """Return q P S of every query: linear attention over changes and errors."""
    product = products(*chunk[:3], cancel=True)
    past = product("bkgth,bkhi->bkgti", query, before.inverse)
    past = product("bkgth,bkhv->bkgtv", past, before.sums)
    if learned.reach is not None:
        past = jnp.where(learned.reach[:, :, None], past, 0)
    weights = product("bkgth,bksh->bkgts", query, learned.changes)
    weights = jnp.where(past_pairs(chunk)[:, None, None], weights, 0)
    return past + product("bkgts,bksv->bkgtv", weights, learned.errors)
