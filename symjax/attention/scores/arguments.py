"""Arguments of score mechanisms, and their checks."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from symjax.attention.core.arguments import (
    check_choice,
    check_count,
    check_flag,
    check_heads,
    check_kind,
    check_log_decay,
    check_number,
    device_count,
    shown,
)
from symjax.attention.core.lengths import LAWS


@dataclass(frozen=True, kw_only=True)
class ScoreArguments:
    """Arguments of one call of a score mechanism; `ScoreMechanism` describes them."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    bias: Float[Array, "#B #G #T #S"] | None
    mask: Bool[Array, "#B #G #T #S"] | None
    scale: float | Float[Array, ""] | None
    is_causal: bool
    window: Any  # (left, right) after `checked`
    length_base: float | None
    length_scale: Any  # a law by name, or slope and power
    mask_self: bool
    alibi: Float[Array, " G"] | None
    log_decay: Float[Array, "#B #S K"] | None
    sink: Float[Array, " G"] | None
    positions: Int[Array, "#B T"] | None
    segment_ids: Int[Array, "B T"] | None
    lam: Float[Array, "#B #T O"] | None
    signals: int
    axis_name: str | None

    @property
    def output_heads(self) -> int:
        """O, the number of output heads. With `lam` they are the signal heads."""
        return self.groups * (1 if self.lam is None else self.signals)

    @property
    def groups(self) -> int:
        """G, the number of groups of heads. Without `lam` each head is a group."""
        branches = 1 if self.lam is None else self.signals + 1
        return self.query.shape[2] // branches

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        batch, time = self.query.shape[:2]
        return batch, time, self.output_heads, self.value.shape[3]

    def checked(self, who: str) -> "ScoreArguments":
        """Return the arguments with the default scale and the window (left, right).

        Raises:
            ValueError: arguments that do not fit together, naming both, or have the
                wrong type. The message begins with `who`.
        """
        self._check_types(who)
        self._check_shapes(who)
        check_log_decay(who, self.log_decay)
        window = _checked_window(who, self.window)
        scale = self.scale
        if scale is None:
            scale = 1 / math.sqrt(self.query.shape[-1])
        return replace(
            self,
            scale=scale,
            window=(window[0], 0) if self.is_causal else window,
            length_base=_checked_base(who, self.length_base),
        )

    def _check_types(self, who: str) -> None:
        check_count(who, "signals", self.signals)
        has_branches = self.lam is not None
        if self.signals > 1 and not has_branches:
            raise ValueError(f"{who}: signals {self.signals} needs lam, got None")
        heads = {"branches": has_branches, "signals": self.signals}
        check_heads(who, self.query, self.key, self.value, **heads)
        check_kind(who, jnp.bool_, mask=self.mask)
        check_kind(
            who,
            jnp.number,
            bias=self.bias,
            lam=self.lam,
            alibi=self.alibi,
            log_decay=self.log_decay,
            sink=self.sink,
        )
        check_kind(
            who, jnp.integer, positions=self.positions, segment_ids=self.segment_ids
        )
        check_number(who, "scale", self.scale)
        self._check_law(who)
        check_flag(who, "is_causal", self.is_causal)
        check_flag(who, "mask_self", self.mask_self)

    def _check_law(self, who: str) -> None:
        law = self.length_scale
        if law is None:
            return
        if self.length_base:
            raise ValueError(
                f"{who}: length_base {shown(self.length_base)} and length_scale "
                f"{shown(law)} are two laws of length: choose one"
            )
        if isinstance(law, str):
            check_choice(who, "length_scale", law, LAWS)
        elif not isinstance(law, tuple) or len(law) != 2:
            raise ValueError(
                f"{who}: length_scale must be a name or (slope, power), got "
                f"{shown(law)}"
            )
        else:
            check_kind(who, jnp.number, slope=law[0], power=law[1])

    def _check_shapes(self, who: str) -> None:
        query, key = self.query.shape, self.key.shape
        if self.is_causal and self.positions is None and key[1] < query[1]:
            raise ValueError(
                f"{who}: causal attention aligns the last query with the last key and "
                f"needs as many keys as queries, got {query} and {key}"
            )
        batch, time, heads = query[0], query[1], self.output_heads
        keys = device_count(who, self.axis_name) * key[1]
        pairs = (batch, self.groups, time, keys)
        slope, power = (
            self.length_scale if isinstance(self.length_scale, tuple) else (None, None)
        )
        for name, array, wanted in (
            ("mask", self.mask, pairs),
            ("bias", self.bias, pairs),
            ("lam", self.lam, (batch, time, heads)),
            ("slope", slope, (batch, time, self.groups)),
            ("power", power, (batch, time, self.groups)),
            ("positions", self.positions, (batch, time)),
            ("log_decay", self.log_decay, key[:3]),
        ):
            if array is not None and not _broadcasts(array, wanted):
                raise ValueError(
                    f"{who}: {name} must broadcast to {wanted} for query {query} and "
                    f"key {key}, got {array.shape}"
                )
        of_heads = (self.groups,)
        for name, array, number in (
            ("alibi", self.alibi, "slope"),
            ("sink", self.sink, "logit"),
        ):
            if array is not None and array.shape != of_heads:
                raise ValueError(
                    f"{who}: {name} must have one {number} per head {of_heads} for "
                    f"query {query}, got {array.shape}"
                )
        if self.positions is not None and self.axis_name is not None:
            raise ValueError(
                f"{who}: positions have no meaning with axis_name {self.axis_name!r}"
            )
        ids = self.segment_ids
        if ids is not None and not ids.shape == query[:2] == key[:2]:
            raise ValueError(
                f"{who}: segment_ids must be [batch, time] of both query and key, got "
                f"{ids.shape} for {query} and {key}"
            )


def _broadcasts(array: Array, shape: tuple[int, ...]) -> bool:
    """Return whether an array broadcasts to a shape and has as many axes."""
    sizes = zip(array.shape, shape, strict=False)
    return array.ndim == len(shape) and all(x in (1, y) for x, y in sizes)


def _checked_base(who: str, base: float | None) -> float | None:
    """Return the base of the length scale as a Python float; None: no scale."""
    if base is None:
        return None
    if not isinstance(base, int | float | np.number):
        raise ValueError(f"{who}: length_base must be a number, got {shown(base)}")
    if not base:
        return None
    if not 1 < base < math.inf:
        raise ValueError(f"{who}: length_base must be above 1 and finite, got {base}")
    return float(base)


def _checked_window(who: str, window: Any) -> tuple[int | None, int | None]:
    """Return the numbers of keys that a row sees before and after its own position.

    None means no bound.

    Raises:
        ValueError: the window is neither one number above 0 nor two numbers of at
            least 0.
    """
    pair = window if isinstance(window, tuple) else (window, window)
    least = 0 if isinstance(window, tuple) else 1
    numbers = [x for x in pair if x is not None]
    known = all(
        isinstance(x, int | np.integer) and not isinstance(x, bool) and x >= least
        for x in numbers
    )
    if len(pair) != 2 or not known:
        raise ValueError(
            f"{who}: window must be (left, right), numbers of keys or None, or one "
            f"number above 0, got {shown(window)}"
        )
    # Differences of positions must fit int32; no sequence has 2³⁰ tokens.
    left, right = (None if x is None else min(int(x) - least, 2**30) for x in pair)
    return left, right
