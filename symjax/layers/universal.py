"""The Universal Transformer: one block in place of many, with adaptive halting."""

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
    """What adaptive computation time keeps of each token between steps."""

    spent: Float[Array, "B T"]  # the sum of the weights so far; 1 is halted
    ponder: Float[Array, "B T"]  # steps taken, plus the remainder once halted


def halt(
    halting: Halting, probability: Float[Array, "B T"], *, last: bool
) -> tuple[Float[Array, "B T"], Halting]:
    """The weight of a step's state in the output, and the tokens that halt with it.

    The weight is the probability, until the probabilities reach 0.99 or the last step
    comes: that step takes the remainder, what the weights so far lack to 1. Steps
    after it have weight 0. The number of steps has no gradient, the remainder has one.

    Source: Graves 2016, arXiv:1603.08983, equations 5–11.
    """
    running = halting.spent < 1
    halts = last | (halting.spent + probability >= ENOUGH)
    spent = jnp.where(halts, 1.0, halting.spent + probability)
    weight = spent - halting.spent
    cost = 1 + jnp.where(halts, weight, 0.0)
    return weight, Halting(spent, halting.ponder + jnp.where(running, cost, 0.0))


class UniversalBlock(nnx.Module):
    """One block applied up to `depth` times, as often as each token needs.

    s_r = block(s_{r−1} + e_r), p_r = sigmoid(W s_r/|s_r| + b), out = Σ_r w_r s_r

    with the input s_0, a learned embedding e_r of the step, b = 1 at first, and the
    weights w_r of `halt`, which sum to 1. The state of a token that has halted stays
    as it is; tokens that continue still see it. A token's ponder cost is the number of
    its steps plus the remainder.

    The paper does not divide by |s_r|. A token that halts in its first step gives
    halting no gradient, and without the division Adam got there within 300 steps of
    configs/universal.py:tiny: about 90 % of tokens took one step, with a ponder cost or
    without.

    All tokens are computed at every step: depth times the cost of a block, with the
    weights of one. Halting is a threshold, so rounding can move a token to another
    step: two forms of computation then differ by 1 % of a step in its own output, by
    more in what later tokens see of it.

    Args:
        options: the model's configuration; `depth` is the number of steps, and `remat`
            applies to each of them.
    Raises:
        ValueError: a pattern of mechanisms, since there is one block; a mechanism that
            replaces the feed-forward too.
    Source: Dehghani et al. 2018, arXiv:1807.03819.
    """

    def __init__(self, options: config.Model, *, rngs: nnx.Rngs):
        if len(set(options.pattern)) > 1:
            raise ValueError(
                f"model.pattern {', '.join(options.pattern)} is of several blocks: a "
                "universal model repeats one"
            )
        mechanism = config.mechanism_of(options, 0)
        if MECHANISMS[mechanism].gated:
            raise ValueError(
                f"model.attention.mechanism {mechanism!r} is a block of its own: a "
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
            dtype=jnp.float32,  # since a threshold follows
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
        """The tokens after their last steps; arguments as those of `Block`.

        With a dropout key, in training, every token's ponder cost [B T], from 2 (one
        step) to depth + 1, stays behind as the `nnx.Intermediate` `ponder`, for
        `nnx.pop`. Without one the module does not change, so that `jax.jit` may close
        over it.
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
        """The layers inside with a mechanism, in the order of their calls."""
        return self.block.attentions * self.depth

    def init_cache(self, batch: int, length: int) -> tuple[Any, ...]:
        """The decoding states of all steps before the first of `length` tokens."""
        return tuple(self.block.init_cache(batch, length) for _ in range(self.depth))

    def decode(
        self,
        x: Float[Array, "B T D"],
        cache: tuple[Any, ...],
        position: Int[Array, "B"],
        padding_mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[Any, ...]]:
        """The next T tokens of every example from its cache; as `Block.decode`."""
        caches = list(cache)

        def advance(step: int, x: Array) -> Array:
            x, caches[step] = self.block.decode(x, caches[step], position, padding_mask)
            return x

        output, _ = self._steps(x, advance)
        return output, tuple(caches)

    def _steps(
        self, state: Array, advance: Callable[[int, Array], Array]
    ) -> tuple[Array, Array]:
        """(output, ponder cost) of depth steps, each `advance(step, state)`."""
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
    """s/|s|; an added 1e-6 keeps the gradient of a zero state finite."""
    wide = state.astype(jnp.promote_types(state.dtype, jnp.float32))
    return wide * jax.lax.rsqrt((wide**2).sum(axis=-1, keepdims=True) + 1e-6)
