"""The attention layer: weights, and the choices of model.attention.

A layer combines three main choices, which are keys of model.attention:

symmetric        how keys and values are made: by their own projections, or keys from
                 the queries, or values from the keys, or both from the queries
mechanism        how the weight of a query and a key is computed
differential     none: one map; v1: A₁ − λA₂ with one λ per layer; v2: A₁ − λA₂ with one
                 λ per token and head

`symjax.layers.validate` refuses combinations that exclude each other. The weights of
the mechanism come from a `Part` (`symjax.layers.parts`). `Mixer` runs the mechanism.

λ. `symjax.attention.differential` has the formula of differential attention. A V1 layer
computes λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init in `Attention.lam`. By default
λ_init depends on the depth (`_add_lambda`). A V2 layer computes λ = sigmoid(W x) in
`Attention.operands`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from symjax import attention, config
from symjax.layers.convolution import Convolved, ShortConvolution
from symjax.layers.mixer import mixer_of
from symjax.layers.norms import HeadNorm
from symjax.layers.parts.table import part_of
from symjax.layers.position_term import PositionTerm
from symjax.layers.primitives import Linear, keep_for_backward, rotary
from symjax.layers.segments import Segments, positions_of, row_operands
from symjax.layers.sharded import Operand
from symjax.layers.validate import can_have_head_norm

RULES = (
    ("attention/lambda_projection/kernel", P("fsdp", "tensor")),
    ("attention/lambda_*", P(None)),
    ("attention/metric", P("tensor", None, None)),  # U of `symmetric` pairwise
)
GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}
# Values of model.attention.symmetric → the projections of a layer.
PROJECTIONS = {
    "none": ("query", "key", "value"),
    "plain": ("query", "value"),
    "pairwise": ("query", "value"),
    "kv": ("query", "key"),
    "qkv": ("query",),
}


class Lambda(nnx.Param):
    """Learned λ vector of differential V1; `nnx.state(model, Lambda)` returns all.

    `symjax.training.optimizer` keeps weights with "lambda" in their path out of weight
    decay.
    """


class Attention(nnx.Module):
    """Self-attention with the choices of model.attention.

    The mechanisms gau and flash have a `GatedBlock` instead. Attention is causal in
    decoders. In an encoder a token sees all tokens except padding, or with
    model.attention.window the near ones on both sides.

    With differential V1, each head has two branches of model.head_size features, by
    default width/(2N), and values of twice that size. The output of a head passes an
    RMSNorm and is multiplied by 1 − λ_init. With V2, each head has two queries of
    model.head_size features, by default width/N, and one key. `decay`, `delta` and
    `mesa` have an RMSNorm per head too (`Part.head_norm`).
    model.attention.head_norm=False leaves out the RMSNorm, but not 1 − λ_init.

    With `symmetric` kv, values are the projected keys before norms and rotations; with
    qkv they are the projected queries. In V1 the value of a head is then the
    concatenation of the keys (or queries) of its two branches. With kv and qkv the
    cache of a score mechanism holds only values, and `keys_of` makes the keys of them.

    Args:
        options: the model's configuration.
        depth: depth of this layer, counted from 0.
    Raises:
        ValueError: choices that exclude each other, naming both.
    """

    # Attributes whose value differs from layer to layer. `symjax.models.scanned`, which
    # runs all layers in one loop, passes them as arrays.
    BY_DEPTH = ("lambda_initial",)

    def __init__(self, options: config.Model, depth: int, *, rngs: nnx.Rngs):
        self.chosen = chosen = options.attention
        self.mixer = mixer_of(options, depth)
        has_keys = self.mixer.entry.keys
        self.symmetric = chosen.symmetric if has_keys else "plain"
        self.projections = PROJECTIONS[self.symmetric]
        self.part = part_of(self.mixer.mechanism)
        self.rotate = rotary(options, self.mixer.sizes.head_size)
        self._add_projections(options, rngs)
        self.lambda_initial: Any = 0.0
        if chosen.differential != "none":
            self._add_lambda(options, depth, rngs)
        if chosen.position_term:
            self.position_term = PositionTerm(
                self.mixer.sizes.head_groups, chosen.position_term
            )
        if self.part.weights is not None:
            weights = self.part.weights(options, depth, self.mixer.sizes, rngs)
            for name, weight in weights.items():
                setattr(self, name, weight)
        self.has_head_norm = chosen.head_norm and can_have_head_norm(options, depth)
        if self.has_head_norm:
            normed = {"epsilon": options.norm_eps, "dtype": self.mixer.dtype}
            size = self.mixer.sizes.value_size
            self.head_norm = HeadNorm(size, **normed, rngs=rngs)

    def _add_projections(self, options: config.Model, rngs: nnx.Rngs) -> None:
        """Add all projections, with their convolutions and norms."""
        heads, kv_heads, queries, keys, size, value_size = self.mixer.sizes
        shared = {"dtype": self.mixer.dtype, "rngs": rngs}

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, use_bias=options.bias, **shared)

        self.query = linear(options.width, queries * size)
        if "key" in self.projections:
            self.key = linear(options.width, keys * size)
            if self.chosen.symmetric_initial:
                self.key.kernel[...] = jnp.copy(self.query.kernel[...])
        elif self.symmetric == "pairwise":
            draw = nnx.initializers.normal(size**-0.5)
            self.metric = nnx.Param(draw(rngs.params(), (queries, size, size)))
        if "value" in self.projections:
            self.value = linear(options.width, kv_heads * value_size)
        self.out = linear(heads * value_size, options.width)
        if self.chosen.output_gate != "none":
            self.output_gate = linear(options.width, heads * value_size)
        if (taps := self.chosen.short_convolution) > 0:
            for kind in self.projections:
                channels = getattr(self, kind).out_features
                convolution = ShortConvolution(taps, channels, **shared)
                setattr(self, f"{kind}_convolution", convolution)
        if self.chosen.query_key_norm:
            normed = {**shared, "epsilon": options.norm_eps}
            self.query_norm = HeadNorm(size, **normed)
            if "key" in self.projections:
                self.own_key_norm = HeadNorm(size, **normed)

    def _add_lambda(self, options: config.Model, depth: int, rngs: nnx.Rngs) -> None:
        """Add the weights of λ: four vectors for V1, a projection for V2."""
        heads, dtype = self.mixer.sizes.heads, self.mixer.dtype
        if self.chosen.differential == "v2":
            shared = {"use_bias": False, "dtype": dtype, "rngs": rngs}
            self.lambda_projection = Linear(options.width, heads, **shared)
            return
        self.lambda_initial = self.chosen.lambda_initial
        if self.lambda_initial < 0:
            depth += self.chosen.depth_offset
            self.lambda_initial = attention.lambda_initial(depth)
        draw = nnx.initializers.normal(0.1)

        def vector() -> Lambda:
            return Lambda(draw(rngs.params(), (self.mixer.sizes.head_size,)))

        self.lambda_query_1, self.lambda_key_1 = vector(), vector()
        self.lambda_query_2, self.lambda_key_2 = vector(), vector()

    def __call__(
        self,
        x: Float[Array, "B T D"],
        padding_mask: Bool[Array, "B T"] | None = None,
        segments: Segments | None = None,
    ) -> Float[Array, "B T D"]:
        """Return the output of attention for each token.

        Args:
            padding_mask: True for tokens, False for padding, which no token sees. By
                default there is no padding.
            segments: the documents of a row, which do not see each other. By default
                the row is one document.
        """
        positions = positions_of(x, segments)
        lengths = self.rotate.lengths(positions, padding_mask, segments)
        operands = self.operands(x, positions, segments=segments, lengths=lengths)
        operands |= row_operands(padding_mask, segments)
        return self._output(x, self.mixer(operands), operands)

    def init_cache(self, batch: int, length: int) -> Any:
        """Return the decoding state before the first of at most `length` tokens."""
        arguments = {} if self.part.state is None else self.part.state(self)
        cache = self.mixer.init_cache(batch, length, **arguments)
        if not self.chosen.short_convolution:
            return cache
        inputs = {
            kind: getattr(self, f"{kind}_convolution").init_cache(batch)
            for kind in self.projections
        }
        return Convolved(cache, inputs)

    def decode(
        self,
        x: Float[Array, "B T D"],
        cache: Any,
        position: Int[Array, "B"],
        padding_mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Read the next T tokens of each example; return (output, new cache).

        `cache`, `position` and `padding_mask` are those of `Mixer.decode`.
        """
        positions, inputs = position[:, None] + jnp.arange(x.shape[1])[None], None
        if self.chosen.short_convolution:
            cache, inputs = cache.cache, dict(cache.inputs)
        lengths = self.rotate.lengths(positions, padding_mask)
        operands = self.operands(x, positions, inputs, padding_mask, lengths=lengths)
        if self.chosen.position_term:
            places = jnp.arange(cache.value.shape[1])[None]
            operands["bias"] = self.position_term.bias_of(places)
        keys_of = partial(self.keys_of, lengths=lengths)
        mixed, cache = self.mixer.decode(
            operands, cache, position, padding_mask, keys_of
        )
        if inputs is not None:
            cache = Convolved(cache, inputs)
        return self._output(x, mixed, operands), cache

    def operands(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "#B T"],
        *decoding,
        segments: Segments | None = None,
        lengths: Int[Array, "#B #T"] | None = None,
    ) -> dict[str, Operand]:
        """Return the operands of the mechanism, each with its sharding.

        The arguments are those of `project`.
        """
        options = {"segments": segments, "lengths": lengths}
        query, key, value = self.project(x, positions, *decoding, **options)
        operands = {
            "query": Operand(query, "BTN"),
            "key": Operand(key, "BSK"),
            "value": Operand(value, "BSK"),
        }
        if self.chosen.position_term:
            query = self.position_term.scaled(query)
            operands["query"] = operands["query"]._replace(array=query)
            operands["bias"] = self.position_term.bias_of(positions)
        if self.chosen.differential == "v1":
            operands["lam"] = Operand(self.lam(), "")
        elif self.chosen.differential == "v2":
            lam = jax.nn.sigmoid(self.lambda_projection(x))
            operands["lam"] = Operand(lam, "BTN")
        if self.part.operands is not None:
            operands = self.part.operands(self, x, operands)
        return operands

    def project(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "#B T"],
        inputs: dict[str, Array] | None = None,
        padding_mask: Bool[Array, "B T"] | None = None,
        *,
        segments: Segments | None = None,
        lengths: Int[Array, "#B #T"] | None = None,
    ) -> tuple[Array, Array, Array]:
        """Return queries, keys and values per head.

        Queries and keys are rotated by their positions.

        Args:
            inputs: in decoding, the last inputs that each convolution has read. This
                dict is updated in place.
            padding_mask: True for tokens, False for padding, which comes after them
                (`generate` moves it there).
            segments: documents; convolutions do not read across their borders.
            lengths: number of tokens in the document (or row) that each token belongs
                to. Some rotations depend on it. By default it is the largest position
                of the row + 1.
        """
        inputs = {} if inputs is None else inputs

        def projected(kind: str, size: int) -> Float[Array, "B T K H"]:
            y = keep_for_backward(getattr(self, kind)(x))
            if self.chosen.short_convolution:
                convolve = getattr(self, f"{kind}_convolution")
                before = inputs.get(kind)
                y, inputs[kind] = convolve(y, before, padding_mask, segments=segments)
            return y.reshape(*y.shape[:2], y.shape[-1] // size, size)

        sizes = self.mixer.sizes
        projected_query = projected("query", sizes.head_size)
        query, value = projected_query, None
        if "value" in self.projections:
            value = projected("value", sizes.value_size)
        if self.chosen.query_key_norm:
            query = self.query_norm(projected_query)
        if "key" in self.projections:
            source = projected("key", sizes.head_size)
            key = self._normed_key(source)
        else:
            source = projected_query
            key = self._key_of_query(query)
        if value is None:
            value = source.reshape(*source.shape[:2], sizes.kv_heads, sizes.value_size)
        if lengths is None:
            lengths = self.rotate.lengths(positions)
        rotated = self.rotate(query, positions, lengths)
        if key is query:  # one rotation is enough
            return rotated, rotated, value
        return rotated, self.rotate(key, positions, lengths), value

    def keys_of(
        self, value: Float[Array, "B S K V"], *, lengths: Int[Array, "#B #S"] | None
    ) -> Float[Array, "B S K H"]:
        """Return the keys of the first S tokens from their values.

        With `symmetric` kv and qkv a cache holds values alone. Each decoding step
        normalises and rotates them again to get keys, in O(S H) per head.

        Args:
            lengths: as in `project`.
        """
        projected = value.reshape(*value.shape[:2], -1, self.mixer.sizes.head_size)
        if "key" in self.projections:
            key = self._normed_key(projected)
        else:
            norm = self.query_norm if self.chosen.query_key_norm else lambda x: x
            key = self._key_of_query(norm(projected))
        return self.rotate(key, jnp.arange(value.shape[1])[None], lengths)

    def _normed_key(self, key: Float[Array, "B T K H"]) -> Float[Array, "B T K H"]:
        return self.own_key_norm(key) if self.chosen.query_key_norm else key

    def _key_of_query(self, query: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        metric = self.metric[...] if self.symmetric == "pairwise" else None
        normalise = {"none": None}.get(self.chosen.key_norm, self.chosen.key_norm)
        return attention.symmetric_key(query, metric, normalise=normalise)

    def lam(self) -> Float[Array, ""]:
        """Return λ of a differential V1 layer, from its learned vectors and λ_init."""
        return attention.differential_lambda(
            self.lambda_query_1[...],
            self.lambda_key_1[...],
            self.lambda_query_2[...],
            self.lambda_key_2[...],
            self.lambda_initial,
        )

    def _output(
        self, x: Array, mixed: Float[Array, "B T N V"], operands: dict[str, Operand]
    ) -> Float[Array, "B T D"]:
        if self.part.output is not None:
            mixed = self.part.output(self, mixed, operands)
        factor = 1.0
        if self.chosen.differential == "v1":
            factor -= self.lambda_initial
        if self.has_head_norm:
            mixed = self.head_norm(mixed, factor)
        elif self.chosen.differential == "v1":
            mixed = mixed * factor
        mixed = jax.lax.collapse(mixed, 2)
        if self.chosen.output_gate != "none":
            gate = GATES[self.chosen.output_gate]
            mixed = mixed * gate(keep_for_backward(self.output_gate(x)))
        return self.out(mixed)
