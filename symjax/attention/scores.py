"""Score mechanisms: what all of them are called with, and what sets each one apart."""

from dataclasses import dataclass

from jaxtyping import Array, Bool, Float, Int

from symjax.attention.ring import attend_ring
from symjax.attention.rows import RowWeights, attend_rows


@dataclass(frozen=True, repr=False)
class ScoreMechanism:
    """Attention by scores of pairs, given by the weights that a row of scores makes.

    The value is the public function: `softmax = ScoreMechanism("softmax", …)`, then
    `softmax(query, key, value)`.

    Attributes:
        name: as errors and tables print it.
        weights: (scores [B N t s], visible [#B #N t s] or None) → weights, 0 where not
            visible. A module's function or a hashable value, so that jit knows it.
        description: formula, cost and source, for `help`.
        implementations: "rows" and "whole" serve any weights; "ring" adds up weights
            of exp(score) over their sum, so only softmax names it.
    """

    name: str
    weights: RowWeights
    description: str = ""
    implementations: tuple[str, ...] = ("rows", "whole")

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
        scale: float | None = None,
        is_causal: bool = False,
        length_base: float | None = None,
        mask_self: bool = False,
        segment_ids: Int[Array, "B T"] | None = None,
        implementation: str | None = None,
        axis_name: str | None = None,
    ) -> Float[Array, "B T N V"]:
        """Time O(T S (H + V)) a head, half of it if causal; memory linear in T and S.

        Weights are computed in float32 at least; a row that sees no key gives zeros.

        Args:
            mask: True = attend.
            scale: of the scores, 1/√H by default.
            is_causal: the last query sees every key (bottom-right alignment).
            length_base: multiply a row's scores by log n / log length_base, n the keys
                it sees (entropy-invariant scaling); None or 0: off.
            mask_self: hide a token from itself unless it sees nothing else.
            segment_ids: tokens see only their own run of equal ids; needs T = S.
            implementation: "rows" (the default), "whole" for one block of all rows, or
                for softmax "ring": over an axis keys and values travel and are not
                gathered, see `attend_ring`; without an axis as "rows".
            axis_name: in a `jax.shard_map`, the mesh axis that time is split over:
                query, key, value and segment_ids are a device's own stretch, mask and
                bias are of its own rows and of all keys.
        Raises:
            ValueError: shapes that do not fit together, naming both.
        """
        return self.attend(
            query,
            key,
            value,
            bias,
            mask,
            scale=scale,
            is_causal=is_causal,
            length_base=length_base,
            mask_self=mask_self,
            segment_ids=segment_ids,
            implementation=implementation,
            axis_name=axis_name,
        )

    def attend(self, *arrays, implementation: str | None = None, **options) -> Array:
        """The same with one more option: `lam`, of the branches of differential heads.

        Options are those of `attend_rows`.
        """
        if implementation not in (None, *self.implementations):
            raise ValueError(
                f"{self.name}: implementation {implementation!r} is unknown: choose "
                f"from {', '.join(self.implementations)}"
            )
        if implementation == "ring":
            return attend_ring(self.weights, *arrays, **options)
        whole = implementation == "whole"
        return attend_rows(self.weights, *arrays, whole=whole, **options)
