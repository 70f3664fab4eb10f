"""The log-decays of a layer: a number a head, or a gate a channel."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from symjax import config
from symjax.attention.gated_linear import LOG_DECAYS
from symjax.layers.parts.part import Part, Sizes
from symjax.layers.primitives import Linear
from symjax.layers.sharded import Operand

RANK = 16  # of the gate's map, as in GLA
SOFTPLUS = ("mamba2", "kda")


class FixedDecay(nnx.Module):
    """A log-decay a head: of RetNet, of one of the published Lightning slopes, or 0.

    Args:
        branches: key heads of each head, which share one decay.
    Raises:
        ValueError: decay_heads do not divide the key/value heads.
    """

    BY_DEPTH = ("rates",)

    def __init__(self, options: config.Model, depth: int, branches: int):
        heads, kind = _heads_with_rates(options), options.attention.decay
        kv_heads = options.kv_heads or options.heads
        if kv_heads % heads:
            raise ValueError(
                f"model.attention.decay_heads {heads} must divide the {kv_heads} "
                "key/value heads"
            )
        self.branches = branches * (kv_heads // heads)
        with jax.ensure_compile_time_eval():  # concrete numbers, also under eval_shape
            rule: Any = LOG_DECAYS[kind].rates
            self.rates: Any = tuple(map(float, rule(heads, depth, options.depth)))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "1 1 K"]:
        return jnp.repeat(jnp.asarray(self.rates), self.branches)[None, None]


def _has_rates(kind: str) -> bool:
    """Return whether decays of this kind are constants that depend on the head."""
    return kind != "none" and LOG_DECAYS[kind].rates is not None


def _heads_with_rates(options: config.Model) -> int:
    return options.attention.decay_heads or options.kv_heads or options.heads


class GatedDecay(nnx.Module):
    """A function of up(down(x)) for every key head, or for every channel of it.

    GLA has log sigmoid(up(down(x)))/16 of every channel.

    Args:
        kind: a name in `LOG_DECAYS`.
        shape: of the decays of a token, (heads,) or (heads, channels).
    Source: Yang et al. 2023, arXiv:2312.06635, section 4.4.
    """

    def __init__(
        self, kind: str, width: int, shape: tuple[int, ...], *, dtype, rngs: nnx.Rngs
    ):
        self.kind, self.shape = kind, shape
        shared = {"dtype": dtype, "rngs": rngs}
        self.down = Linear(width, RANK, use_bias=False, **shared)
        self.up = Linear(RANK, math.prod(shape), use_bias=True, **shared)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T K *H"]:
        logits = self.up(self.down(x)).astype(jnp.float32)
        gate: Any = LOG_DECAYS[self.kind].gate
        return gate(logits.reshape(*x.shape[:2], *self.shape))


class SoftplusDecay(nnx.Module):
    """−exp(rate) Δ, with Δ = softplus(up(x) + bias) of every key head or channel.

    A head as in Mamba-2 and Gated DeltaNet; a channel, from a map of low rank, as in
    Kimi Delta Attention. At first exp(rate) is uniform in [1, 16], and softplus(bias)
    log-uniform in [0.001, 0.1].

    Args:
        shape: of the decays of a token, (heads,) or (heads, channels).
        rank: of the map of channels.
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
        """Δ, in float32 at least."""
        logits = self.up(x if len(self.shape) == 1 else self.down(x))
        logits = logits.astype(jnp.promote_types(x.dtype, jnp.float32))
        steps = jax.nn.softplus(logits + self.bias[...][None, None])
        return steps.reshape(*x.shape[:2], *self.shape)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T K *H"]:
        ones = (1,) * (len(self.shape) - 1)
        return -jnp.exp(self.rate[...]).reshape(1, 1, -1, *ones) * self.step(x)


def decay_of(
    options: config.Model, depth: int, sizes: Sizes, rngs: nnx.Rngs
) -> dict[str, Any]:
    """The module with the log-decay of every key head."""
    kind, head = options.attention.decay, (sizes.keys, sizes.head_size)
    if options.attention.decay_heads and not _has_rates(kind):
        raise ValueError(
            f"model.attention.decay_heads {options.attention.decay_heads} is of "
            f"constant decays: model.attention.decay is {kind!r}"
        )
    shared = {"dtype": jnp.dtype(options.dtype), "rngs": rngs}
    rule = LOG_DECAYS[kind]
    shape = head if rule.per == "channel" else head[:1]
    if rule.gate is not None:
        return {"decay": GatedDecay(kind, options.width, shape, **shared)}
    if kind in SOFTPLUS:
        decay = SoftplusDecay(options.width, shape, sizes.value_size, **shared)
        return {"decay": decay}
    return {"decay": FixedDecay(options, depth, sizes.keys // sizes.kv_heads)}


def _weights(
    options: config.Model, depth: int, sizes: Sizes, rngs: nnx.Rngs
) -> dict[str, Any]:
    found = decay_of(options, depth, sizes, rngs)
    if options.attention.decay == "mamba2":
        found["skip"] = nnx.Param(jnp.ones(sizes.heads))
    return found


def _operands(layer: Any, x: Array, operands: dict[str, Operand]) -> dict[str, Operand]:
    """Of Mamba-2 Δ also multiplies the values; here the keys, which give its heads."""
    operands = operands | {"log_decay": Operand(layer.decay(x), "BTK")}
    if layer.chosen.decay == "mamba2":
        key, step = operands["key"], layer.decay.step(x)[..., None]
        scaled = key.array * step.astype(key.array.dtype)
        operands["key"] = key._replace(array=scaled)
    return operands


def _output(layer: Any, mixed: Array, operands: dict[str, Operand]) -> Array:
    """Of Mamba-2 a token's own value is added, times a number of its head."""
    if layer.chosen.decay != "mamba2":
        return mixed
    value = operands["value"].array
    value = jnp.repeat(value, mixed.shape[2] // value.shape[2], axis=2)
    return mixed + layer.skip[...].astype(value.dtype)[None, None, :, None] * value


def decay_converted(
    weights: dict[str, Any], source: config.Model, target: config.Model
) -> dict[str, Any]:
    """Decays of another kind start fresh; both branches of a head get the head's."""
    before, after = source.attention, target.attention
    if before.decay != after.decay:
        return {x: given for x, given in weights.items() if x not in ("decay", "skip")}
    combined = before.differential, after.differential
    if combined == ("none", "v2") and "skip" in weights:
        return weights | {"skip": weights["skip"] / 2}  # the values are twice as large
    if combined != ("none", "v1"):
        return weights
    rule = LOG_DECAYS[after.decay]
    gate = ("up",) if rule.gate is not None and rule.per == "head" else ()
    by_head = {"mamba2": ("up", "bias", "rate"), "kda": ("rate",)}
    by_head = by_head.get(after.decay, gate)
    twice = {
        name: jax.tree.map(lambda x: jnp.repeat(x, 2, axis=-1), given)
        for name, given in weights.get("decay", {}).items()
        if name in by_head
    }
    return weights | ({"decay": weights["decay"] | twice} if twice else {})


def check_rates(source: config.Model, target: config.Model) -> None:
    """Raise if the same weights would decay at other constant rates.

    Raises:
        ValueError: the heads with rates of their own differ, naming the key.
    """
    heads = _heads_with_rates(source)
    kind = source.attention.decay
    if not _has_rates(kind) or kind != target.attention.decay:
        return
    if heads != (found := _heads_with_rates(target)):
        raise ValueError(
            f"constant decays of {heads} heads differ from those of {found}: give the "
            f"target model.attention.decay_heads={heads}"
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
