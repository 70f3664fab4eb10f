"""Score mechanisms: what all of them are called with, and what sets each one apart.

The whole map of a score mechanism's weights, for reading.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
from einops import repeat
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.arguments import check_choice
from symjax.attention.core.operands import Operands, RowWeights, Rule
from symjax.attention.core.options import Option, chosen
from symjax.attention.core.sequence import first_token, gather, segment_runs_over
from symjax.attention.core.visibility import Visibility, only_seen
from symjax.attention.kernels import dispatch
from symjax.attention.scores import rows
from symjax.attention.scores.arguments import ScoreArguments
from symjax.attention.scores.ring import attend_ring
from symjax.attention.scores.rows import attend_rows
from symjax.attention.scores.windows import attend_window, attend_window_of_device


@dataclass(frozen=True)
class WeightsWithOptions:
    """Row weights with values for their keywords; equal ones are compiled once."""

    weights: Callable
    options: tuple[tuple[str, Any], ...]

    def __call__(self, scores: Array, visible: Array | None) -> Any:
        return self.weights(scores, visible, **dict(self.options))


@dataclass(frozen=True, repr=False)
class ScoreMechanism:
    """Attention by scores of pairs, given by the weights that a row of scores makes.

    The value is the public function: `softmax = ScoreMechanism("softmax", …)`, then
    `softmax(query, key, value)`.

    Attributes:
        name: as errors and tables print it.
        weights: (scores [B N t s], visible [#B #N t s] or None) → weights, 0 where not
            visible, or a pair of weights and their divisors [B N t 1]; hashable, since
            programs are compiled for it.
        description: formula, cost and source, for `help`.
        implementations: "rows" and "whole" serve any weights; "fused", "hopper",
            "cudnn" and "ring" add up weights of exp(score) over their sum, so only
            softmax names them.
        own: options of `weights`, which gets them as keywords: `cap` of
            `softcap(query, key, value, cap=30.0)`.
    """

    name: str
    weights: RowWeights
    description: str = ""
    implementations: tuple[str, ...] = ("rows", "whole")
    own: dict[str, Option] = field(default_factory=dict, hash=False, compare=False)

    def __post_init__(self):
        documented = f"{self.description}\n\n{type(self).__call__.__doc__}"
        object.__setattr__(self, "__doc__", documented)
        object.__setattr__(self, "__name__", self.name)

    def __repr__(self) -> str:
        return f"symjax.attention.{self.name}"

    def __call__(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K V"],
        bias: Float[Array, "#B #N #T #S"] | None = None,
        mask: Bool[Array, "#B #N #T #S"] | None = None,
        *,
        scale: float | Float[Array, ""] | None = None,
        is_causal: bool = False,
        window: int | tuple[int | None, int | None] | None = None,
        length_base: float | None = None,
        mask_self: bool = False,
        alibi: Float[Array, " N"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        lam: Float[Array, "#B #T N/2"] | None = None,
        implementation: str | None = None,
        axis_name: str | None = None,
        **own: Any,
    ) -> Float[Array, "B T N V"]:
        """Time O(T S (H + V)) a head, half of it if causal, O(T (left + right) (H + V))
        in a window; memory linear in T and S.

        Weights are computed in float32 at least; a row that sees no key gives zeros.

        Args:
            mask: True = attend.
            scale: of the scores, 1/√H by default.
            is_causal: a query sees no later key; the last one sees every key
                (bottom-right alignment).
            window: (left, right), how many keys before and after its own a query sees;
                None is no bound. A number n is (n − 1, n − 1): itself and n − 1 more.
            length_base: multiply a row's scores by log n / log length_base, n the keys
                it sees, at least 16 (entropy-invariant scaling); None or 0: off.
            mask_self: hide a token from itself unless it sees nothing else.
            alibi: slopes m of a bias −m·|distance|, as `alibi_slopes` gives them.
            positions: of the queries among the keys, by default the last T places.
            segment_ids: tokens see only their own run of equal ids; needs T = S.
            lam: the weights of heads 2n and 2n + 1 become one, w[2n] − lam[n]·w[2n+1];
                they share mask, bias and value: what `differential` runs.
            implementation: "rows", "whole" for one block of all rows, or for softmax
                "fused", a kernel for TPUs that other machines interpret, slowly,
                "hopper", one for the two maps of `differential` on H100 and H200, whose
                gradients of queries differ by rounding from run to run,
                "cudnn", one for NVIDIA GPUs, and "ring": over an axis keys and values
                travel and are not gathered, see `attend_ring`; without an axis as
                "rows". None: the machine's kernel where it serves, see
                `symjax.attention.kernels.dispatch`, else "rows".
            axis_name: in a `jax.shard_map`, the mesh axis that time is split over:
                query, key, value and segment_ids are a device's own stretch, mask and
                bias are of its own rows and of all keys.
            own: options that this mechanism declares.
        Raises:
            ValueError: shapes that do not fit together, naming both; an implementation
                that does not serve these arguments, saying why.
        """
        if implementation is not None:
            known = self.implementations
            check_choice(self.name, "implementation", implementation, known)
        weights = self._weights(own)
        arguments = ScoreArguments(
            query=query,
            key=key,
            value=value,
            bias=bias,
            mask=mask,
            scale=scale,
            is_causal=is_causal,
            window=window,
            length_base=length_base,
            mask_self=mask_self,
            alibi=alibi,
            positions=positions,
            segment_ids=segment_ids,
            lam=lam,
            axis_name=axis_name,
        ).checked(self.name)
        no_rows = 0 in query.shape[:2]
        if no_rows or key.shape[1] == 0 or value.shape[3] == 0:
            return jnp.zeros(arguments.output_shape, value.dtype)
        in_ring = implementation == "ring" and axis_name is not None
        operands = _operands(arguments, gathers_keys=not in_ring)
        rule = _rule(arguments, weights, whole=implementation == "whole")
        if in_ring:
            engine = partial(attend_ring, axis_name=axis_name)
        elif implementation in dispatch.KERNELS:
            engine = dispatch.forced(implementation, rule, operands)
        else:
            engine = _by_rows(operands, axis_name)
            if implementation is None:
                engine = dispatch.best(self.implementations, engine, rule, operands)
        return jnp.swapaxes(engine(rule, operands), 1, 2)

    def _weights(self, own: dict[str, Any]) -> RowWeights:
        """Return the row weights with the options that the mechanism declares."""
        values = chosen(self.name, self.own, own)
        return WeightsWithOptions(self.weights, values) if values else self.weights


def _rule(arguments: ScoreArguments, weights: RowWeights, *, whole: bool) -> Rule:
    """Return the static half of a call, which programs are compiled for."""
    scale, first = arguments.scale, arguments.key.shape[1] - arguments.query.shape[1]
    known = arguments.axis_name is None and arguments.positions is None
    return Rule(
        weights,
        float(scale) if isinstance(scale, Real) else None,
        arguments.length_base,
        offset=first if known else None,
        whole=whole,
        dtypes=(arguments.key.dtype, arguments.value.dtype),
        block_rows=rows.BLOCK_ROWS,
        extents=rows.EXTENTS,
        few_keys=rows.FEW_KEYS,
    )


def _operands(arguments: ScoreArguments, *, gathers_keys: bool) -> Operands:
    """Return the arrays of a call with heads before time.

    What scores and weights are multiplied by is float32 at least. With `lam`, both
    branches of a head have its bias, slope and mask.

    Args:
        gathers_keys: bring all keys and values of the mesh axis that time is split
            over to each device, and set those that the mask hides to zero.
    """
    visibility = _visibility(arguments)
    query, key, value = arguments.query, arguments.key, arguments.value
    bias, alibi, mask = arguments.bias, arguments.alibi, arguments.mask
    lam = arguments.lam
    if gathers_keys and arguments.axis_name is not None:
        key, value = gather((key, value), arguments.axis_name)
    if gathers_keys and mask is not None:
        key, value = only_seen(mask.any(axis=(1, 2)), key, value)
    wide = jnp.promote_types(jnp.result_type(query, key, value), jnp.float32)
    if alibi is not None:
        alibi = alibi.astype(wide)[None, :, None, None]
    if lam is not None:
        bias, alibi, mask = map(_for_both_branches, (bias, alibi, mask))
        lam = jnp.swapaxes(lam, 1, 2).astype(wide)
    return Operands(
        query=jnp.swapaxes(query, 1, 2),
        key=jnp.swapaxes(key, 1, 2),
        value=jnp.swapaxes(value, 1, 2),
        bias=bias,
        slopes=alibi,
        lam=lam,
        scale=jnp.asarray(arguments.scale, wide),
        visibility=replace(visibility, mask=mask),
    )


def _visibility(arguments: ScoreArguments) -> Visibility:
    """Return which keys each row sees, without the mask.

    With `axis_name`, rows are those of a device and keys those of all devices.
    """
    time, keys = arguments.query.shape[1], arguments.key.shape[1]
    first: int | Array = keys - time
    if arguments.axis_name is not None:
        first = first_token(arguments.query, arguments.key, arguments.axis_name)
        keys *= jax.lax.axis_size(arguments.axis_name)
    positions = arguments.positions
    if positions is None:
        positions = (first + jnp.arange(time))[None]
    row_segments = key_segments = None
    if arguments.segment_ids is not None:
        row_segments, key_segments = segment_runs_over(
            arguments.segment_ids, arguments.axis_name
        )
    return Visibility(
        rows=positions,
        keys=jnp.arange(keys)[None],
        row_segments=row_segments,
        key_segments=key_segments,
        window=arguments.window,
        mask_self=arguments.mask_self,
        length=keys,
        consecutive=arguments.positions is None,
    )


def _by_rows(operands: Operands, axis_name: str | None) -> Callable:
    """Return the engine of row blocks that these operands are for."""
    if None in operands.visibility.window:
        return attend_rows
    return attend_window if axis_name is None else attend_window_of_device


def _for_both_branches(pairs: Array | None) -> Array | None:
    """Repeat each head of [B N T S] for its two branches; one for all heads stays."""
    if pairs is None or pairs.shape[1] == 1:
        return pairs
    return repeat(pairs, "b n t s -> b (n p) t s", p=2)


def row_map(
    weights: RowWeights,
    query: Float[Array, "B T Nq H"],
    key: Float[Array, "B S Nk H"],
    *,
    lam: Float[Array, "#B #T N"] | None = None,
    shared_keys: bool = False,
    **options: Any,
) -> Float[Array, "B N T S"]:
    """The whole map of weights, for reading: O(T S) memory.

    It is the output of a score mechanism of these weights for unit vectors as values;
    `options` are its own.

    Args:
        shared_keys: with `lam`, both query heads of a pair look at one key
            (differential V2); otherwise each has its own (V1).
    """
    branches = 1 if lam is None or shared_keys else 2
    heads = key.shape[2] // branches
    units = jnp.eye(key.shape[1], dtype=query.dtype)[None, :, None]
    value = jnp.broadcast_to(units, (key.shape[0], key.shape[1], heads, key.shape[1]))
    attend = ScoreMechanism("row_map", weights)
    options = {"implementation": "whole", **options}
    return jnp.swapaxes(attend(query, key, value, lam=lam, **options), 1, 2)
