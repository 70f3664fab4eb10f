"""Log-decays of a layer: constants per head, or gates per head or channel."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from symjax import config
from symjax.attention.gated_linear import LOG_DECAYS
from symjax.layers.parts.part import Part, Sizes, repeat_key_heads
from symjax.layers.primitives import Linear
from symjax.layers.sharded import Operand

RANK = 16  # rank of the low-rank map of gates, as in GLA
SOFTPLUS = ("mamba2", "kda")


class FixedDecay(nnx.Module):
    """Constant log-decay per head, for instance that of RetNet.

    Args:
        kind: a name in `LOG_DECAYS`, which has the rates.
        heads: number of different rates.
        keys: number of key heads, a multiple of `heads`.
        depth, layers: depth of this layer, counted from 0, and number of layers.
    """

    BY_DEPTH = ("rates",)

    def __init__(self, kind: str, heads: int, keys: int, depth: int, layers: int):
        self.heads_per_rate = keys // heads
        with jax.ensure_compile_time_eval():  # concrete numbers, also under eval_shape
            rates: Any = LOG_DECAYS[kind].rates
            self.rates: Any = tuple(map(float, rates(heads, depth, layers)))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "1 1 K"]:
        return jnp.repeat(jnp.asarray(self.rates), self.heads_per_rate)[None, None]


def has_rates(kind: str) -> bool:
    """Return whether decays of this kind are constants that depend on the head."""
    return kind != "none" and LOG_DECAYS[kind].rates is not None


def _heads_with_rates(options: config.Model) -> int:
    """Return the number of heads with different rates."""
    return options.attention.decay_heads or options.kv_heads or options.heads


class GatedDecay(nnx.Module):
    """Learned log-decay gate(up(down(x))) or gate(up(x)), per key head or per channel.

    The gate of GLA is log sigmoid(·)/16, per channel. That of FoX, the Forgetting
    Transformer, is log sigmoid(·), per head and without `down`.

    Args:
        kind: a name in `LOG_DECAYS`, which has the gate.
        shape: (heads,) or (heads, channels) of a token's decays.
    Source: Yang et al. 2023, arXiv:2312.06635, section 4.4; Lin et al. 2025,
        arXiv:2503.02130, section 3.
    """

    def __init__(
        self, kind: str, width: int, shape: tuple[int, ...], *, dtype, rngs: nnx.Rngs
    ):
        self.kind, self.shape = kind, shape
        shared = {"dtype": dtype, "rngs": rngs}
        self.low_rank = LOG_DECAYS[kind].low_rank
        if self.low_rank:
            self.down = Linear(width, RANK, use_bias=False, **shared)
        rank = RANK if self.low_rank else width
        self.up = Linear(rank, math.prod(shape), use_bias=True, **shared)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T K *H"]:
        logits = self.up(self.down(x) if self.low_rank else x).astype(jnp.float32)
        gate: Any = LOG_DECAYS[self.kind].gate
        return gate(logits.reshape(*x.shape[:2], *self.shape))


class SoftplusDecay(nnx.Module):
    """Learned log-decay −exp(rate) Δ, Δ = softplus(up(x) + bias).

    There is one per key head (Mamba-2, Gated DeltaNet), or one per channel, from a
    low-rank map up(down(x)) (Kimi Delta Attention). The weight `rate` holds the
    logarithm of a rate. Initially exp(rate) is uniform in [1, 16], and softplus(bias)
    log-uniform in [0.001, 0.1].

    Args:
        shape: (heads,) or (heads, channels) of a token's decays.
        rank: rank of the map to channels.
    Source: Dao & Gu 2024, arXiv:2405.21060; Kimi Team 2025, arXiv:2510.26692.
    """

    def __init__(
        self, width: int, shape: tuple[int, ...], rank: int, *, dtype, rngs: nnx.Rngs
    ):
        self.shape, count = shape, math.prod(shape)
        shared = {"use_bias": False, "dtype": dtype, "rngs": rngs}
        if len(shape) == 2:
            self.down = Linear(width, rank, **shared)
        self.up = Linear(rank if len(shape) == 2 else width, count, **shared)
        steps = 0.001 * 100 ** jax.random.uniform(rngs.params(), (count,))
        self.bias = nnx.Param(jnp.log(jnp.expm1(steps)))
        rates = jax.random.uniform(rngs.params(), shape[:1], minval=1.0, maxval=16.0)
        self.rate = nnx.Param(jnp.log(rates))

    def step(self, x: Float[Array, "B T D"]) -> Float[Array, "B T K *H"]:
        """Return Δ, in float32 at least."""
        logits = self.up(x if len(self.shape) == 1 else self.down(x))
        logits = logits.astype(jnp.promote_types(x.dtype, jnp.float32))
        steps = jax.nn.softplus(logits + self.bias[...][None, None])
        return steps.reshape(*x.shape[:2], *self.shape)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T K *H"]:
        ones = (1,) * (len(self.shape) - 1)
        return -jnp.exp(self.rate[...]).reshape(1, 1, -1, *ones) * self.step(x)


def decay_of(
    options: config.Model,
    depth: int,
    sizes: Sizes,
    rngs: nnx.Rngs,
    *,
    key: str = "decay",
) -> nnx.Module:
    """Return the module that computes the log-decays of a layer.

    Args:
        key: the key of model.attention that chooses them, decay or forget.
    Raises:
        ValueError: decay_heads is set and model.attention.decay is no constant,
            decay_heads do not divide the key/value heads, or heads with different
            rates share a noise key.
    """
    kind, head = getattr(options.attention, key), (sizes.keys, sizes.head_size)
    decay_heads = options.attention.decay_heads
    if key == "decay" and decay_heads and not has_rates(kind):
        raise ValueError(
            f"model.attention.decay_heads {decay_heads} needs constant decays, but "
            f"model.attention.decay is {kind!r}"
        )
    shared = {"dtype": jnp.dtype(options.dtype), "rngs": rngs}
    log_decay = LOG_DECAYS[kind]
    shape = head if log_decay.per == "channel" else head[:1]
    if log_decay.gate is not None:
        return GatedDecay(kind, options.width, shape, **shared)
    if kind in SOFTPLUS:
        return SoftplusDecay(options.width, shape, sizes.value_size, **shared)
    if not has_rates(kind):
        return FixedDecay(kind, sizes.keys, sizes.keys, depth, options.depth)
    heads = _heads_with_rates(options)
    if sizes.kv_heads % heads:
        raise ValueError(
            f"model.attention.decay_heads {heads} must divide the {sizes.kv_heads} "
            "key/value heads"
        )
    if sizes.keys % sizes.kv_heads:
        raise ValueError(
            f"model.attention.{key} {kind!r} has a rate for each key/value head: with "
            f"model.attention.signals {options.attention.signals} give at most "
            f"model.kv_heads={sizes.keys - sizes.kv_heads}, the number of noise heads"
        )
    return FixedDecay(kind, heads, sizes.keys, depth, options.depth)


def _weights(
    options: config.Model, depth: int, sizes: Sizes, rngs: nnx.Rngs
) -> dict[str, Any]:
    weights: dict[str, Any] = {"decay": decay_of(options, depth, sizes, rngs)}
    if options.attention.decay == "mamba2":
        weights["skip"] = nnx.Param(jnp.ones(sizes.heads))
    return weights


def _operands(layer: Any, x: Array, operands: dict[str, Operand]) -> dict[str, Operand]:
    """Add the log-decays. For Mamba-2, also multiply the keys by Δ.

    The paper multiplies the values by Δ instead. The products k vᵀ are equal.
    """
    operands = operands | {"log_decay": Operand(layer.decay(x), "BTK")}
    if layer.chosen.decay == "mamba2":
        key, step = operands["key"], layer.decay.step(x)[..., None]
        scaled = key.array * step.astype(key.array.dtype)
        operands["key"] = key._replace(array=scaled)
    return operands


def _output(layer: Any, mixed: Array, operands: dict[str, Operand]) -> Array:
    """For Mamba-2, add the token's value times `skip`, a weight per head."""
    if layer.chosen.decay != "mamba2":
        return mixed
    value = operands["value"].array
    value = jnp.repeat(value, mixed.shape[2] // value.shape[2], axis=2)
    return mixed + layer.skip[...].astype(value.dtype)[None, None, :, None] * value


def gate_of_key_heads(
    gate: dict[str, Any], source: config.Model, target: config.Model
) -> dict[str, Any]:
    """Return the weights of a gate, with key heads repeated as in the target.

    The map `down` stays, since all heads share it.
    """
    repeated = repeat_key_heads(
        {name: x for name, x in gate.items() if name != "down"}, source, target
    )
    return gate | repeated


def decay_converted(
    weights: dict[str, Any], source: config.Model, target: config.Model
) -> dict[str, Any]:
    """Return the decay weights of a layer of the target.

    Decays of another kind keep their initial values. Copies of a key head have its
    decay. If only the target is differential (V1), both branches of a head get its
    decay per head, or the decays of their channels.
    """
    before, after = source.attention, target.attention
    if before.decay != after.decay:
        return {x: y for x, y in weights.items() if x not in ("decay", "skip")}
    if "decay" in weights:
        repeated = gate_of_key_heads(weights["decay"], source, target)
        weights = weights | {"decay": repeated}
    combined = before.differential, after.differential
    if combined == ("none", "v2") and "skip" in weights:
        return weights | {"skip": weights["skip"] / 2}  # values become twice as large
    if combined != ("none", "v1"):
        return weights
    log_decay = LOG_DECAYS[after.decay]
    has_gate_per_head = log_decay.gate is not None and log_decay.per == "head"
    per_head = {"mamba2": ("up", "bias", "rate"), "kda": ("rate",)}
    per_head = per_head.get(after.decay, ("up",) if has_gate_per_head else ())
    twice = {
        name: jax.tree.map(lambda x: jnp.repeat(x, 2, axis=-1), weight)
        for name, weight in weights.get("decay", {}).items()
        if name in per_head
    }
    return weights | ({"decay": weights["decay"] | twice} if twice else {})


def check_rates(source: config.Model, target: config.Model) -> None:
    """Raise if heads of the target would decay at other constant rates.

    Raises:
        ValueError: the numbers of heads with different rates differ, naming the key.
    """
    heads = _heads_with_rates(source)
    kind = source.attention.decay
    if not has_rates(kind) or kind != target.attention.decay:
        return
    if heads != (of_target := _heads_with_rates(target)):
        raise ValueError(
            f"constant decays of {heads} heads differ from those of {of_target}: give "
            f"the target model.attention.decay_heads={heads}"
        )


DECAY = Part(
    weights=_weights,
    operands=_operands,
    output=_output,
    head_norm=True,
    keys=lambda chosen: ("decay", "decay_heads"),
    rules=(
        ("decay/down/kernel", P("fsdp", None)),
        ("decay/up/kernel", P(None, "tensor")),
        ("decay/rate", P("tensor")),
        ("decay/bias", P("tensor")),
        ("skip", P("tensor")),
    ),
    owned=("decay", "skip"),
    convert=decay_converted,
    check=check_rates,
)
