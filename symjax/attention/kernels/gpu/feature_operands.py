"""Operands of the kernels for normalised linear attention on NVIDIA GPUs.

The kernels of `states` and `features` read arrays in whole chunks of time
(`SegmentNumbers`) and whole blocks of features (`pad_features`). `FeatureForm` says how
arrays of features become weights. Products run in TF32, so their operands are `rounded`
before.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from symjax.attention.core.feature_maps import UNDERFLOW, Features
from symjax.attention.core.meshes import vary_alike
from symjax.attention.core.operands import Tokens
from symjax.attention.core.sequence import id_changes
from symjax.attention.kernels.gpu.chunks import BLOCK, CHUNK, SIZES, iota, pad_to_chunks
from symjax.attention.kernels.operands import VisibleTokens

ROUNDING = 2.0**-10  # rounding error of a weight of bounded features in TF32


def rounded(x: Array) -> Array:
    """Round to the nearest TF32 number.

    Tensor cores may truncate instead. Errors of truncation have one sign and would add
    up in a sum.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    nearest = jax.lax.bitcast_convert_type((bits + 0x1000) & -0x2000, jnp.float32)
    return jnp.where(x == x, nearest, x)  # a NaN whose bits are all 1 would become 0


def padded_feature_count(size: int) -> int:
    """Return the number of features, rounded up to whole blocks of a kernel."""
    block = min(BLOCK, max(SIZES[0], 1 << (size - 1).bit_length()))
    return -(-size // block) * block


def pad_features(x: Float[Array, "B T N M"], nothing: float) -> Array:
    """Pad the features to whole blocks with `FeatureForm.nothing`."""
    missing = [(0, 0)] * 3 + [(0, padded_feature_count(x.shape[3]) - x.shape[3])]
    return jnp.pad(x, missing, constant_values=nothing)


class SegmentNumbers(NamedTuple):
    """Segment numbers of queries and keys; −1 for hidden keys.

    A query sees the earlier keys with its own number.
    """

    query: Int[Array, "B T"]
    key: Int[Array, "B T"]

    @classmethod
    def of(cls, tokens: Tokens) -> tuple[Array, Array, Array, "SegmentNumbers"]:
        """Return query, key, value, and segment numbers, padded to whole chunks.

        Hidden keys and values are 0.
        """
        query, key, value, visible, segment = VisibleTokens.of(tokens)
        if visible is None:
            visible = jnp.ones(query.shape[:2], bool)
        if segment is None:
            segment = jnp.zeros(query.shape[:2], jnp.int32)
        query, key, value, visible = map(pad_to_chunks, (query, key, value, visible))
        # Padding belongs to the last segment. Kernels compare the segments of the last
        # tokens of chunks, and a 0 there could continue an earlier segment.
        missing = [(0, 0), (0, visible.shape[1] - segment.shape[1])]
        segment = jnp.pad(segment, missing, mode="edge")
        ids = cls(segment, jnp.where(visible, segment, -1))
        return vary_alike((query, key, value, ids))

    def operands(self) -> list[tuple[Any, Array]]:
        """Return both as operands of `call_kernel`; a program reads all of time."""
        spec = pl.BlockSpec((None, self.key.shape[1]), lambda i, n, b: (b, 0))
        return [(spec, x) for x in self]


def mean_weights(
    query: Float[Array, "B T N M"], ids: SegmentNumbers
) -> Float[Array, "B T N M"]:
    """Divide the features of each query by the number of keys that it sees.

    The divisor cancels in the output. With it the denominator of a row is the mean
    weight, which can be compared with the rounding error of a weight.
    """
    visible = ids.key >= 0
    count = jnp.cumsum(visible, axis=1)
    before = jnp.where(id_changes(ids.query), count - visible, 0)
    count -= jax.lax.cummax(before, axis=1)
    return query / jnp.maximum(count, 1).astype(query.dtype)[..., None, None]


def visible_in_chunk(
    query_segment: Any, key_segment: Any
) -> tuple[Array, Array, Array, Array]:
    """Return which rows see which keys in the chunk of this program.

    Kernels select by these masks and never multiply by 0, since hidden numbers may be
    NaN.

    Returns:
        pairs: [CHUNK CHUNK], whether a row sees a key of the chunk.
        reaches: [CHUNK 1], whether a row sees the state before the chunk.
        joins: [CHUNK 1], whether a key belongs to the state after the chunk.
        continues: whether any row sees the state before the chunk.
    """
    first = pl.program_id(0) * CHUNK
    here = pl.ds(first, CHUNK)
    row, column = query_segment[here], key_segment[here]
    pairs = (iota(0) >= iota(1)) & (row[:, None] == column[None, :])
    before = query_segment[jnp.maximum(first - 1, 0)]
    last = query_segment[first + CHUNK - 1]
    continues = query_segment[first] == before
    return pairs, (row == before)[:, None], (column == last)[:, None], continues


class FeatureForm(NamedTuple):
    """Form of the arrays that kernels get for queries and keys.

    Attributes:
        has_exponents: whether the arrays are exponents of features.
        features: an elementwise map by which kernels compute features from the arrays;
            None if the arrays are features or exponents.
        bounded: whether features are at most 1 and may change sign. The denominator of
            a row then is its mean weight.
    """

    has_exponents: bool
    features: Features | None = None
    interpret: Any = False
    bounded: bool = False

    @property
    def nothing(self) -> float:
        """The exponent, or the feature, of a key with weight 0."""
        return -jnp.inf if self.has_exponents else 0.0

    def features_of(self, x: Array) -> Array:
        """Return the features of an array that has no exponents."""
        if self.features is None:
            return x
        return self.features.key(x, None).amplitude

    def query_weights(self, x: Array, highest: Array, shift: Array) -> Array:
        """Return the weights of queries relative to the shift of their row.

        Args:
            highest: the exponents that key weights are relative to.
            shift: with exponents, the largest x + highest of each row, so that weights
                are at most 1; otherwise the divisor of the row.
        """
        # In this order of operations the largest weight is exactly 1, since the shift
        # is a sum x + highest.
        if self.has_exponents:
            return jnp.exp((x + highest) - shift)
        return self.features_of(x) / shift

    def key_weights(self, x: Array, highest: Array) -> Array:
        return jnp.exp(x - highest) if self.has_exponents else self.features_of(x)

    def query_gradient(
        self, change: Array, x: Array, row: Array, inverse: Array, shift: Array
    ) -> Array:
        """Return the gradient of x, an array of queries.

        Args:
            change: the gradient of weights / denominator.
            row: the query's weights / denominator.
            inverse: 1 / denominator.
        """
        if self.has_exponents:
            return change * row
        # Small factors are multiplied by large ones first, which avoids underflow.
        return change * inverse * self._slope(x) / shift

    def key_gradient(self, change: Array, x: Array, weights: Array) -> Array:
        """Return the gradient of x by `change`, the gradient of the key's weights."""
        return change * (weights if self.has_exponents else self._slope(x))

    def _slope(self, x: Array) -> Array:
        return jax.jvp(self.features_of, (x,), (jnp.ones_like(x),))[1]

    def inverse(self, denominator: Array) -> Array:
        """Return 1 / denominator, or 0 if the denominator is too small to divide by.

        Such a row sees no key, or its weights underflow. The weights of bounded
        features may also cancel.
        """
        least = UNDERFLOW if self.has_exponents else jnp.finfo(jnp.float32).tiny
        least = ROUNDING if self.bounded else least
        return jnp.where(denominator < least, 0.0, 1 / denominator)

    def highest(self, x: Array, so_far: Array, axis: int) -> Array:
        """Return `so_far`; with exponents, its maximum with x along an axis."""
        return jnp.maximum(so_far, x.max(axis=axis)) if self.has_exponents else so_far
