"""Score mechanisms: attention by a score for every pair of a query and a key.

`ScoreMechanism` is the class of their public functions. Mechanisms differ only in their
row weights: the function that turns the scores of rows into weights. `row_map` returns
the whole map of weights, for plots and measurements.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import repeat
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.arguments import check_choice
from symjax.attention.core.operands import RowWeights, ScoreArrays, ScoreSettings
from symjax.attention.core.options import Option, chosen
from symjax.attention.core.sequence import first_token, gather, segment_runs_over
from symjax.attention.core.visibility import Visibility, hidden_as_zero
from symjax.attention.kernels import dispatch
from symjax.attention.scores import rows
from symjax.attention.scores.adjustment import adjustment_of
from symjax.attention.scores.arguments import ScoreArguments
from symjax.attention.scores.ring import attend_ring
from symjax.attention.scores.rows import attend_rows
from symjax.attention.scores.windows import attend_window, attend_window_of_device


@dataclass(frozen=True)
class WeightsWithOptions:
    """Row weights with values for keywords; hashable, as a static argument must be."""

    weights: Callable
    options: tuple[tuple[str, Any], ...]

    def __call__(self, scores: Array, visible: Array | None) -> Any:
        return self.weights(scores, visible, **dict(self.options))


@dataclass(frozen=True, repr=False)
class ScoreMechanism:
    """Attention by scores of pairs.

    An instance is a public function: `softmax = ScoreMechanism("softmax", …)` is called
    as `softmax(query, key, value)`.

    Attributes:
        name: name in errors and tables.
        weights: function of (scores [B N t s], visible [#B #N t s] or None). It returns
            weights, which are 0 for pairs that are not visible, or (weights, divisor
            [B N t 1]). It must be hashable.
        description: formula, cost and source, for `help`.
        implementations: names that a call may choose. "rows" and "whole" support all
            weights. "tpu", "gpu_differential", "cudnn" and "ring" compute
            exp(score) / Σ exp, so only softmax has them.
        own: options that the mechanism declares. A call takes them as keywords, and
            passes them to `weights`.
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
        bias: Float[Array, "#B #G #T #S"] | None = None,
        mask: Bool[Array, "#B #G #T #S"] | None = None,
        *,
        scale: float | Float[Array, ""] | None = None,
        is_causal: bool = False,
        window: int | tuple[int | None, int | None] | None = None,
        length_base: float | None = None,
        length_scale: str | tuple[Array, Array] | None = None,
        mask_self: bool = False,
        alibi: Float[Array, " G"] | None = None,
        log_decay: Float[Array, "#B #S K"] | None = None,
        sink: Float[Array, " G"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        lam: Float[Array, "#B #T O"] | None = None,
        signals: int = 1,
        implementation: str | None = None,
        axis_name: str | None = None,
        **own: Any,
    ) -> Float[Array, "B T O V"]:
        """Return the values, averaged by the weights of this mechanism.

        Time O(T S (H + V)) per head, and O(T (left + right) (H + V)) in a window. A
        causal call takes about 1/2 of this time in a kernel. In row blocks it takes
        about 3/4 with up to 2,048 keys, and 9/16 with more, since hidden keys are left
        out by groups of blocks (`scores.rows`). Memory is linear in T and
        S. It is quadratic with implementation "whole", and in cuDNN with segments.

        Without lam each of the N query heads is an output head: O = G = N. With lam and
        r = `signals`, r signal heads and the noise head that they share are a group.
        Then there are G = N/(r + 1) groups and O = r G output heads.

        Weights are computed in float32 at least. A row that sees no key is zero.

        Args:
            mask: True = attend.
            scale: factor of the scores, 1/√H by default.
            is_causal: a query sees no key after its own position. See `positions`: by
                default the last query has the position of the last key (bottom-right
                alignment).
            window: (left, right), the numbers of keys that a query sees before and
                after its own position; None means no bound. A number n means
                (n − 1, n − 1).
            length_base: multiply the scores of a row by log n / log length_base, where
                n is the number of keys that the row sees, but at least 16
                (entropy-invariant scaling). None or 0 turns it off.
            length_scale: another way in which scores depend on n, instead of
                length_base. It is applied before biases are added (see
                `symjax.attention.core.lengths`):

                - "floor": times 1 + 0.1 log(1 + ⌊n / 8192⌋), as in Llama 4.
                - "distance": the score z becomes a z + 1 − a² at distance d, with
                  a² = 1 + 2 log(1 + d/10) (scale-invariant attention).
                - (slope, power), arrays [#B #T #G]: times
                  1 + slope · (log(n + 1))^power (ASEntmax).
            mask_self: hide a token from itself unless it sees nothing else.
            alibi: slopes m of a bias −m·|distance|, see `alibi_slopes`.
            log_decay: logarithms g ≤ 0 of forget gates, one for each key. The score of
                query t and key s becomes score − |c_t − c_s|, with c_t = Σ_{r≤t} g_r.
                In causal attention this adds Σ g_r over s < r ≤ t (FoX, the Forgetting
                Transformer). c is summed in float32 at least. g below −10⁴ counts as
                −10⁴. If the mask hides a key from all rows, its g counts as 0.
            sink: logits of one more key, which every row sees and which has no value.
                Softmax then divides by exp(sink) + Σ exp(score).
            positions: positions of the queries among the keys, by default the last T.
            segment_ids: tokens see only their own run of equal ids; needs T = S.
            lam: λ of differential attention. With r = 1, heads 2n and 2n + 1 become one
                head with weights w[2n] − lam[n]·w[2n+1]. Key may have more heads than
                value, see `symjax.attention.differential`.
            signals: r, see `symjax.attention.differential`.
            implementation: what computes the rows. None chooses a kernel if one
                supports the call (see `symjax.attention.kernels.dispatch`), else
                "rows".

                - "rows": blocks of rows in XLA (`scores.rows`; `scores.windows` if the
                  window has two bounds).
                - "whole": all rows as one block, for tests and plots of maps.
                - "tpu" (softmax): a kernel for TPUs; other machines interpret it,
                  which is slow.
                - "gpu_differential" (softmax): a kernel for `differential` on H100 and
                  H200. Gradients of queries differ by rounding from run to run.
                - "cudnn" (softmax): the kernel of cuDNN for NVIDIA GPUs.
                - "ring" (softmax): with `axis_name`, keys and values pass from device
                  to device and are not gathered, see `attend_ring`. Without
                  `axis_name` it is "rows".

                "fused" and "hopper" are former names of "tpu" and "gpu_differential".
            axis_name: in a `jax.shard_map`, the mesh axis that time is split over. All
                arrays are those of one device, except that mask and bias have the keys
                of all devices.
            own: options that this mechanism declares.
        Raises:
            ValueError: shapes that do not fit together, naming both; an implementation
                that does not support these arguments, with the reason.
        """
        implementation = self._checked_implementation(implementation)
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
            length_scale=length_scale,
            mask_self=mask_self,
            alibi=alibi,
            log_decay=log_decay,
            sink=sink,
            positions=positions,
            segment_ids=segment_ids,
            lam=lam,
            signals=signals,
            axis_name=axis_name,
        ).checked(self.name)
        no_rows = 0 in query.shape[:2]
        if no_rows or key.shape[1] == 0 or value.shape[3] == 0:
            return jnp.zeros(arguments.output_shape, value.dtype)
        in_ring = implementation == "ring" and axis_name is not None
        arrays = _operands(arguments, for_ring=in_ring)
        settings = _settings(arguments, weights, whole=implementation == "whole")
        fallback = InRows(_by_rows(arrays, axis_name), settings)
        if in_ring:
            arrays = arrays.repeat_noise(signals) if signals > 1 else arrays
            output = attend_ring(settings, arrays, axis_name)
        elif implementation is None:
            names = self.implementations
            output = dispatch.run_scores(names, settings, arrays, fallback)
        elif implementation in dispatch.NAMED:
            output = dispatch.run_named(implementation, settings, arrays, fallback)
        else:
            output = fallback(arrays)
        return jnp.swapaxes(output, 1, 2)

    def _weights(self, own: dict[str, Any]) -> RowWeights:
        """Return the row weights with the options that the mechanism declares."""
        if not own and not self.own:
            return self.weights
        values = chosen(self.name, self.own, own)
        return WeightsWithOptions(self.weights, values)

    def _checked_implementation(self, name: str | None) -> str | None:
        """Return the present name of an implementation that the mechanism has."""
        if name is None:
            return None
        known = dispatch.present_name(name)
        if not isinstance(known, str) or known not in self.implementations:
            check_choice(self.name, "implementation", name, self.implementations)
        return known


class InRows(NamedTuple):
    """Fallback of a call: an engine of row blocks in XLA, with its settings."""

    engine: Callable[[ScoreSettings, ScoreArrays], Array]
    settings: ScoreSettings

    def __call__(self, arrays: ScoreArrays) -> Float[Array, "B N T V"]:
        return self.engine(self.settings, arrays)


def _settings(
    arguments: ScoreArguments, weights: RowWeights, *, whole: bool
) -> ScoreSettings:
    """Return the static settings of a call."""
    scale, first = arguments.scale, arguments.key.shape[1] - arguments.query.shape[1]
    known = arguments.axis_name is None and arguments.positions is None
    return ScoreSettings(
        weights,
        float(scale) if isinstance(scale, Real) else None,
        arguments.length_base,
        _law(arguments.length_scale),
        offset=first if known else None,
        whole=whole,
        dtypes=(arguments.key.dtype, arguments.value.dtype),
        block_rows=rows.BLOCK_ROWS,
        extents=rows.EXTENTS,
        few_keys=rows.FEW_KEYS,
        signals=arguments.signals,
    )


def _law(length_scale: str | tuple[Array, Array] | None) -> str | None:
    return "adaptive" if isinstance(length_scale, tuple) else length_scale


def _operands(arguments: ScoreArguments, *, for_ring: bool) -> ScoreArrays:
    """Return the arrays of a call with heads before time.

    With `lam`, bias, alibi and mask have an entry per group of heads (G). The entry is
    repeated for each query head of the group.

    Args:
        for_ring: True leaves keys and values as they are, since the ring gathers none
            and sets hidden ones to zero itself. False sets hidden ones to zero, and
            with `axis_name` first gathers those of all devices.
    """
    visibility = _visibility(arguments)
    query, key, value = arguments.query, arguments.key, arguments.value
    bias, alibi, mask = arguments.bias, arguments.alibi, arguments.mask
    lam = arguments.lam
    if not for_ring and arguments.axis_name is not None:
        key, value = gather((key, value), arguments.axis_name)
    if not for_ring and mask is not None:
        key, value = hidden_as_zero(mask.any(axis=(1, 2)), key, value)
    wide = jnp.promote_types(jnp.result_type(query, key, value), jnp.float32)
    if alibi is not None:
        alibi = alibi.astype(wide)[None, :, None, None]
    if lam is not None:
        branches = partial(_for_branches, count=arguments.signals + 1)
        bias, alibi, mask = map(branches, (bias, alibi, mask))
        lam = jnp.swapaxes(lam, 1, 2).astype(wide)
    return ScoreArrays(
        query=jnp.swapaxes(query, 1, 2),
        key=jnp.swapaxes(key, 1, 2),
        value=jnp.swapaxes(value, 1, 2),
        bias=bias,
        slopes=alibi,
        lam=lam,
        scale=jnp.asarray(arguments.scale, wide),
        visibility=replace(visibility, mask=mask),
        adjustment=adjustment_of(arguments, visibility, wide),
    )


def _visibility(arguments: ScoreArguments) -> Visibility:
    """Return which keys each row sees, without the mask.

    With `axis_name`, rows are of this device, and keys of all devices.
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
        row_positions=positions,
        key_positions=jnp.arange(keys)[None],
        row_segments=row_segments,
        key_segments=key_segments,
        window=arguments.window,
        mask_self=arguments.mask_self,
        length=keys,
        consecutive=arguments.positions is None,
    )


def _by_rows(arrays: ScoreArrays, axis_name: str | None) -> Callable:
    """Return the engine of row blocks, or of windows if the window has two bounds."""
    if None in arrays.visibility.window:
        return attend_rows
    return attend_window if axis_name is None else attend_window_of_device


def _for_branches(pairs: Array | None, count: int) -> Array | None:
    """Repeat each head of [B N T S] `count` times; an axis of length 1 stays."""
    if pairs is None or pairs.shape[1] == 1:
        return pairs
    return repeat(pairs, "b n t s -> b (n p) t s", p=count)


def row_map(
    weights: RowWeights,
    query: Float[Array, "B T Nq H"],
    key: Float[Array, "B S Nk H"],
    *,
    lam: Float[Array, "#B #T N"] | None = None,
    shared_keys: bool = False,
    **options: Any,
) -> Float[Array, "B N T S"]:
    """Return the whole map of weights, in O(T S) memory.

    If the values are the rows of the identity matrix, the output is the map.

    Args:
        shared_keys: with `lam`, both query heads of a pair share a key head
            (differential V2); otherwise each has its own (V1).
        options: those of the score mechanism.
    """
    branches = 1 if lam is None or shared_keys else 2
    heads = key.shape[2] // branches
    units = jnp.eye(key.shape[1], dtype=query.dtype)[None, :, None]
    value = jnp.broadcast_to(units, (key.shape[0], key.shape[1], heads, key.shape[1]))
    attend = ScoreMechanism("row_map", weights)
    options = {"implementation": "whole", **options}
    return jnp.swapaxes(attend(query, key, value, lam=lam, **options), 1, 2)
