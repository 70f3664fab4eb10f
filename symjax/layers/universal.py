"""Universal Transformer: one block repeated, with adaptive halting per token."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from symjax import config
from symjax.attention import MECHANISMS
from symjax.layers.block import Block, run_of
from symjax.layers.primitives import Linear
from symjax.layers.segments import Segments

ENOUGH = 0.99  # the accumulated probability at which a token halts
RULES = (
    ("step_embedding", P(None, "fsdp")),
    ("halting/kernel", P("fsdp", None)),
    ("halting/bias", P(None)),
)


class Halting(NamedTuple):
    """State of adaptive computation time between steps, for each token."""

    spent: Float[Array, "B T"]  # the sum of the weights so far; 1: the token halted
    ponder: Float[Array, "B T"]  # steps taken, plus the remainder once halted


def halt(
    halting: Halting, probability: Float[Array, "B T"], *, last: bool
) -> tuple[Float[Array, "B T"], Halting]:
    """Return the weight of a step's state in the output, and the new halting state.

    The weight is the halting probability. A token halts in the step in which its
    probabilities sum to 0.99, or in the last step. The weight of this step is the
    remainder, 1 − the weights so far; later steps have weight 0. The remainder has a
    gradient, the number of steps has none.

    Source: Graves 2016, arXiv:1603.08983, equations 5–11.
    """
    running = halting.spent < 1
    halts = last | (halting.spent + probability >= ENOUGH)
    spent = jnp.where(halts, 1.0, halting.spent + probability)
    weight = spent - halting.spent
    cost = 1 + jnp.where(halts, weight, 0.0)
    return weight, Halting(spent, halting.ponder + jnp.where(running, cost, 0.0))


class UniversalBlock(nnx.Module):
    """One block applied `depth` times; a token that has halted no longer changes.

    s_r = block(s_{r−1} + e_r), p_r = sigmoid(W s_r/|s_r| + b), out = Σ_r w_r s_r

    s_0 is the input, e_r a learned embedding of the step, b = 1 at first, and the
    weights w_r of `halt` sum to 1. Other tokens still see the state of a token that has
    halted. A token's ponder cost is the number of its steps plus the remainder.

    The paper does not divide by |s_r|. Without the division about 90 % of tokens halted
    in their first step after at most 300 training steps of configs/universal.py:tiny. A
    token that halts in its first step gives the halting weights no gradient.

    All tokens are computed in every step, so the cost is depth times that of a block.
    Since halting is a threshold, rounding can change the step in which a token halts.
    So decoding can differ from whole rows.

    Args:
        options: the model's configuration; `depth` is the number of steps, and `remat`
            applies to each of them.
    Raises:
        ValueError: model.pattern has several mechanisms, or a mechanism replaces the
            feed-forward too.
    Source: Dehghani et al. 2018, arXiv:1807.03819.
    """

    def __init__(self, options: config.Model, *, rngs: nnx.Rngs):
        if len(set(options.pattern)) > 1:
            raise ValueError(
                f"model.pattern {', '.join(options.pattern)} needs several blocks: a "
                "universal model repeats one"
            )
        mechanism = config.mechanism_of(options, 0)
        if MECHANISMS[mechanism].gated:
            raise ValueError(
                f"model.attention.mechanism {mechanism!r} replaces the feed-forward: a "
                "universal model repeats attention and feed-forward"
            )
        self.depth = options.depth
        self.remat = options.remat
        self.block = Block(options, 0, rngs=rngs)
        draw = nnx.initializers.normal(0.02)
        shape = (options.depth, options.width)
        self.step_embedding = nnx.Param(draw(rngs.params(), shape))
        self.halting = Linear(
            options.width,
            1,
            bias_init=nnx.initializers.ones,
            dtype=jnp.float32,  # a threshold follows
            rngs=rngs,
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        padding_mask: Bool[Array, "B T"] | None = None,
        segments: Segments | None = None,
        *,
        dropout_key: Array | None = None,
        watch: Callable | None = None,
    ) -> Float[Array, "B T D"]:
        """Return the sum of weighted states. The arguments are those of `Block`.

        With a dropout key, as in training, the module also stores the ponder cost of
        each token [B T], from 2 (one step) to depth + 1, as the `nnx.Intermediate`
        `ponder`, for `nnx.pop`. Without a key the module does not change, so that
        `jax.jit` may close over it.
        """
        keys = [None] * self.depth
        if dropout_key is not None:
            keys = jax.random.split(dropout_key, self.depth)
        run = run_of(self.remat, watch)
        output, ponder = self._steps(
            x, lambda step, x: run(self.block, x, padding_mask, segments, keys[step])
        )
        if dropout_key is not None:
            self.ponder = nnx.Intermediate(ponder)
        return output

    @property
    def attentions(self) -> list[Any]:
        """Return the attention layer once for each step."""
        return self.block.attentions * self.depth

    def init_cache(self, batch: int, length: int) -> tuple[Any, ...]:
        """Return the decoding states of all steps, before the first token."""
        return tuple(self.block.init_cache(batch, length) for _ in range(self.depth))

    def decode(
        self,
        x: Float[Array, "B T D"],
        cache: tuple[Any, ...],
        position: Int[Array, "B"],
        padding_mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[Any, ...]]:
        """Read the next T tokens of each example, as `Block.decode`."""
        caches = list(cache)

        def advance(step: int, x: Array) -> Array:
            x, caches[step] = self.block.decode(x, caches[step], position, padding_mask)
            return x

        output, _ = self._steps(x, advance)
        return output, tuple(caches)

    def _steps(
        self, state: Array, advance: Callable[[int, Array], Array]
    ) -> tuple[Array, Array]:
        """Return output and ponder cost after `depth` calls of advance(step, state)."""
        zeros = jnp.zeros(state.shape[:2], jnp.float32)
        halting, output = Halting(zeros, zeros), jnp.zeros(state.shape, jnp.float32)
        embeddings = self.step_embedding[...].astype(state.dtype)
        for step in range(self.depth):
            new = advance(step, state + embeddings[step][None, None])
            running = halting.spent < 1
            state = jnp.where(running[..., None], new, state)
            probability = jax.nn.sigmoid(self.halting(_direction(state))[..., 0])
            last = step == self.depth - 1
            weight, halting = halt(halting, probability, last=last)
            output = output + weight[..., None] * state
        return output.astype(state.dtype), halting.ponder


def _direction(state: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Return s/√(|s|² + 1e-6), whose gradient is finite at s = 0."""
    wide = state.astype(jnp.promote_types(state.dtype, jnp.float32))
    return wide * jax.lax.rsqrt((wide**2).sum(axis=-1, keepdims=True) + 1e-6)
