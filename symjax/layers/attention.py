"""The attention layer: four independent choices, one module."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from symjax import attention, config
from symjax.attention.masks import visible_pairs
from symjax.attention.projections import KINDS, unit_statistics
from symjax.layers.cache import KeyValues, check_room, write
from symjax.layers.features import feature_map
from symjax.layers.forms import form_of, has_keys, of_queries, state_first
from symjax.layers.gates import FixedDecay, GatedDecay
from symjax.layers.primitives import Linear, norm, rotary
from symjax.layers.sharded import per_device, time_axis
from symjax.layers.validate import LEARNED, mechanism_options, sizes


class Lambda(nnx.Param):
    """A learned λ vector; stored with the weights, never decayed."""


class Constant(nnx.Variable):
    """An array that is stored with the weights and never optimised."""


class Attention(nnx.Module):
    """Self-attention with any mechanism, kind of key and combination of maps.

    It is causal, save in an encoder, whose tokens see all that exist.

    With differential V1 a head has two branches of size width/2N, values of twice
    that size, and an RMSNorm of its output times 1 − λ_init. With V2 it has two query
    heads of size width/N that share their key, and λ is a map of the token. Mechanisms
    that decay have no denominator: an RMSNorm of every head stands in for it.

    Args:
        options: the model's configuration.
        depth: of this layer, counted from 0.
    Raises:
        ValueError: choices that exclude each other, naming both.
    """

    BY_DEPTH = ("lambda_initial",)

    def __init__(self, options: config.Model, depth: int, *, rngs: nnx.Rngs):
        chosen = options.attention
        self.mechanism = config.mechanism_of(options, depth)
        self.causal = config.is_causal(options)
        self.symmetric = chosen.symmetric if has_keys(self.mechanism) else "plain"
        self.function_scale = chosen.function_scale
        self.differential = chosen.differential
        self.query_key_norm = chosen.query_key_norm
        self.key_norm = None if chosen.key_norm == "none" else chosen.key_norm
        self.positions = options.positions
        self.mask_self = chosen.mask_self
        # hashable, as jit needs
        self.options = tuple(mechanism_options(options, depth).items())
        self.dtype = jnp.dtype(options.dtype)
        self.sizes = sizes(options)
        self.rotate = rotary(options, self.sizes.head_size)
        self._add_projections(options, rngs)
        self.lambda_initial: Any = 0.0
        if self.differential == "v1":
            self._add_lambda(depth + chosen.depth_offset, rngs)
        elif self.differential == "v2":
            self.lambda_projection = Linear(
                options.width,
                self.sizes.heads,
                use_bias=False,
                dtype=self.dtype,
                rngs=rngs,
            )
        self._add_own_weights(options, depth, rngs)
        if self.differential == "v1" or self.decays:
            self.head_norm = norm(
                "rmsnorm", self.sizes.value_size, dtype=self.dtype, rngs=rngs
            )
        if chosen.features and self.mechanism in ("linear", "performer"):
            try:
                jax.eval_shape(lambda: self.init_cache(1, 1))
            except ValueError as error:
                raise ValueError(f"model.attention.features: {error}") from None

    @property
    def decays(self) -> bool:
        return "log_decay" in self._form.operands

    @property
    def _form(self) -> attention.Mechanism:
        return form_of(self.mechanism)

    def _add_projections(self, options: config.Model, rngs: nnx.Rngs) -> None:
        """Queries, keys, values, the output, and their norms."""
        heads, kv_heads, queries, keys, size, value_size = self.sizes

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(
                inputs, outputs, use_bias=options.bias, dtype=self.dtype, rngs=rngs
            )

        self.query = linear(options.width, queries * size)
        if self.symmetric == "none":
            self.key = linear(options.width, keys * size)
        elif self.symmetric == "pairwise":
            draw = nnx.initializers.normal(size**-0.5)
            self.metric = nnx.Param(draw(rngs.params(), (queries, size, size)))
        self.value = linear(options.width, kv_heads * value_size)
        self.out = linear(heads * value_size, options.width)
        if options.attention.output_gate:
            self.output_gate = linear(options.width, heads * value_size)
        if self.query_key_norm:
            shared = {"dtype": self.dtype, "rngs": rngs}
            self.query_norm = norm("rmsnorm", size, **shared)
            if self.symmetric == "none":
                self.own_key_norm = norm("rmsnorm", size, **shared)

    def _add_lambda(self, depth: int, rngs: nnx.Rngs) -> None:
        self.lambda_initial = attention.lambda_initial(depth)
        draw = nnx.initializers.normal(0.1)

        def vector() -> Lambda:
            return Lambda(draw(rngs.params(), (self.sizes.head_size,)))

        self.lambda_query_1, self.lambda_key_1 = vector(), vector()
        self.lambda_query_2, self.lambda_key_2 = vector(), vector()

    def _add_own_weights(
        self, options: config.Model, depth: int, rngs: nnx.Rngs
    ) -> None:
        """What only some mechanisms have: a projection, a feature map, a decay."""
        chosen, size = options.attention, self.sizes.head_size
        queries, keys = self.sizes.queries, self.sizes.keys
        if "projection" in self._form.operands:
            self.projection = Constant(
                attention.orthogonal_projection(
                    rngs.params(),
                    chosen.feature_count,
                    size,
                    norms=chosen.feature_norms,
                )
            )
        if "statistics" in self._form.operands and chosen.features in KINDS:
            self.kind = chosen.features
            self._set_statistics(unit_statistics(size, size**-0.5))
        if self.mechanism == "linear" and chosen.features in LEARNED:
            shared = (size, chosen.feature_count)
            self.query_map = feature_map(chosen.features, queries, *shared, rngs=rngs)
            self.key_map = feature_map(chosen.features, keys, *shared, rngs=rngs)
        if self.decays and chosen.decay == "gated":
            self.decay = GatedDecay(
                options.width, keys, size, dtype=self.dtype, rngs=rngs
            )
        elif self.decays:
            self.decay = FixedDecay(options, depth, keys // self.sizes.kv_heads)

    def _set_statistics(self, found: attention.Statistics) -> None:
        self.statistics_a, self.statistics_b = map(Constant, found)

    def calibrate(self, x: Float[Array, "B T D"]) -> None:
        """Fit what adaptive random features know of queries and keys to a sample.

        They estimate softmax without bias either way, and with less variance so.
        """
        if hasattr(self, "statistics_a"):
            query, key, _ = self.project(x, jnp.arange(x.shape[1])[None])
            found = attention.favor_statistics(query, key, kind=self.kind)
            self._set_statistics(found)

    def __call__(
        self, x: Float[Array, "B T D"], padding_mask: Bool[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """Every token attends to itself and to those it may see.

        Args:
            padding_mask: True for tokens that exist; the others are seen by none.
                None: all.
        """
        arrays = self.arrays(x, jnp.arange(x.shape[1])[None])
        if padding_mask is not None:
            arrays["mask"] = (padding_mask[:, None, None], "B")
        return self._output(x, self.mix(arrays))

    def mix(self, arrays: dict[str, tuple[Any, str]]) -> Float[Array, "B T N V"]:
        """The values as every head weighs them, before its norm; of `arrays`.

        Where a mesh splits the tokens of a row, an encoder gathers them.
        """
        form, options = self._form, dict(self.options)
        function = form.attend
        if not has_keys(self.mechanism):
            function = of_queries(function, self.function_scale)
        elif self.causal and form.causal is not None:
            function = form.causal
        elif self.causal:
            options["is_causal"] = True
        axis = time_axis(arrays["query"][0].shape[1]) if self.causal else None
        if axis is not None:  # keys are a device's own too
            options["axis_name"] = axis
            own = {name: (arrays[name][0], "BTK") for name in ("key", "value")}
            arrays = arrays | own
        return self._combine(function, options, arrays, "BTN", axis)

    def init_cache(self, batch: int, length: int) -> Any:
        """The decoding state before the first token; `length` bounds a cache."""
        size = self.sizes.head_size
        if self._form.state is None:
            shape = (batch, length, self.sizes.keys, size)
            values = (batch, length, self.sizes.kv_heads, self.sizes.value_size)
            return KeyValues(
                jnp.zeros(shape, self.dtype), jnp.zeros(values, self.dtype)
            )
        options = self._step_options()
        if hasattr(self, "projection"):
            options["projection"] = self.projection[...]
        if hasattr(self, "key_map"):
            size = self.key_map.size
        # V2 reads one state with both query heads; V1 has a state for each branch.
        values = self.sizes.value_size
        return self._form.state(batch, self.sizes.keys, size, values, **options)

    def decode(
        self,
        x: Float[Array, "B T D"],
        state: Any,
        position: Int[Array, "B"],
        padding_mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The next T tokens of every example: (output, new state).

        Args:
            position: how many tokens each example has read.
            padding_mask: True for tokens that exist, the others stand at the end; None:
                all.
        Raises:
            ValueError: more tokens than a cache has places.
        """
        positions = position[:, None] + jnp.arange(x.shape[1])[None]
        arrays = self.arrays(x, positions)
        if self._form.state is None:
            places = state.key.shape[1]
            named = f"a cache of {places}"
            check_room(places, named, position, x.shape[1], padding_mask)
            mixed, state = self._read_cache(arrays, state, positions)
            return self._output(x, mixed), state
        arrays["state"] = (state, "BK")
        if x.shape[1] == 1 and padding_mask is None:
            options = self._step_options()
            function = state_first(self._form.step)
        else:
            options = {**dict(self.options), "return_state": True}
            function = self._form.causal or self._form.attend
            if padding_mask is not None:
                arrays["mask"] = (padding_mask[:, None, None], "B")
        mixed, state = self._combine(function, options, arrays, ("BTN", "BK"))
        return self._output(x, mixed), state

    def _read_cache(
        self, arrays: dict[str, Any], cache: KeyValues, positions: Array
    ) -> tuple[Array, KeyValues]:
        """What tokens that are not there write is hidden until it is overwritten."""
        key = write(cache.key, arrays["key"][0], positions)
        value = write(cache.value, arrays["value"][0], positions)
        visible = visible_pairs(
            positions,
            jnp.arange(key.shape[1]),
            is_causal=True,
            mask_self=self.mask_self,
        )
        arrays |= {"key": (key, "BSK"), "value": (value, "BSK"), "mask": (visible, "B")}
        options = dict(self.options)
        options.pop("mask_self", None)  # it is in the mask
        if self.positions == "alibi":
            arrays["bias"] = self._alibi(key.shape[1])
        mixed = self._combine(self._form.attend, options, arrays, "BTN")
        return mixed, KeyValues(key, value)

    def arrays(
        self, x: Float[Array, "B T D"], positions: Int[Array, "#B T"]
    ) -> dict[str, tuple[Any, str]]:
        """All that the mechanism is given, and how it is split over devices."""
        query, key, value = self.project(x, positions)
        if hasattr(self, "query_map"):
            query, key = self.query_map(query), self.key_map(key)
        arrays: dict[str, tuple[Any, str]] = {
            "query": (query, "BTN"),
            "key": (key, "BSK"),
            "value": (value, "BSK"),
        }
        if self.differential == "v1":
            arrays["lam"] = (self.lam(), "")
        elif self.differential == "v2":
            arrays["lam"] = (jax.nn.sigmoid(self.lambda_projection(x)), "BTN")
        if hasattr(self, "projection"):
            arrays["projection"] = (self.projection[...], "")
        if hasattr(self, "statistics_a"):
            found = self.statistics_a[...], self.statistics_b[...]
            arrays["statistics"] = (attention.Statistics(*found), "")
        if hasattr(self, "decay"):
            arrays["log_decay"] = (self.decay(x), "BTK")
        if self.positions == "alibi":
            arrays["bias"] = self._alibi(x.shape[1])
        return arrays

    def _alibi(self, keys: int) -> tuple[Array, str]:
        places = jnp.arange(keys)
        rows = None if self.causal else places
        return attention.alibi_bias(self.sizes.heads, places, rows), "BN"

    def project(
        self, x: Float[Array, "B T D"], positions: Int[Array, "#B T"]
    ) -> tuple[Array, Array, Array]:
        """Queries, keys and values of every (sub-)head, rotated; learned feature maps
        come after."""
        query = self._split(self.query(x), self.sizes.head_size)
        value = self._split(self.value(x), self.sizes.value_size)
        if self.query_key_norm:
            query = self.query_norm(query)
        if self.symmetric == "none":
            key = self._split(self.key(x), self.sizes.head_size)
            if self.query_key_norm:
                key = self.own_key_norm(key)
        else:
            metric = self.metric[...] if self.symmetric == "pairwise" else None
            key = attention.symmetric_key(query, metric, normalise=self.key_norm)
        return self.rotate(query, positions), self.rotate(key, positions), value

    def _combine(
        self,
        function: Callable,
        options: dict[str, Any],
        arrays: dict[str, tuple[Any, str]],
        output: Any,
        axis: str | None = None,
    ) -> Any:
        """`function` over all heads, its maps combined as the layer combines them."""

        def run(query, key, value, lam: Any = None, **more) -> Any:
            more = options | more
            if self.differential == "none":
                return function(query, key, value, **more)
            combine = attention.differential
            if self.differential == "v2":
                combine = attention.differential_v2
            return combine(query, key, value, lam, attend=function, **more)

        return per_device(run, arrays, output, time=axis)

    def _step_options(self) -> dict[str, Any]:
        """The options of a step and of a state: those of the causal form but one."""
        return {name: x for name, x in self.options if name != "chunk_size"}

    def lam(self) -> Float[Array, ""]:
        """λ of a differential V1 layer as it stands."""
        return attention.differential_lambda(
            self.lambda_query_1[...],
            self.lambda_key_1[...],
            self.lambda_query_2[...],
            self.lambda_key_2[...],
            self.lambda_initial,
        )

    def _output(self, x: Array, mixed: Float[Array, "B T N V"]) -> Array:
        if hasattr(self, "head_norm"):
            mixed = self.head_norm(mixed)
        if self.differential == "v1":
            mixed = mixed * (1 - self.lambda_initial)
        mixed = jax.lax.collapse(mixed, 2)
        if hasattr(self, "output_gate"):
            mixed = mixed * jax.nn.silu(self.output_gate(x))
        return self.out(mixed)

    @staticmethod
    def _split(x: Array, size: int) -> Array:
        return x.reshape(*x.shape[:2], x.shape[-1] // size, size)
