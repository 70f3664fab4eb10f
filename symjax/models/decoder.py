"""The decoder: a causal language model over any attention mechanism."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from symjax import config
from symjax.layers.segments import segments_of
from symjax.models import transformer


class Cache(NamedTuple):
    """Decoding cache: the state of every layer, and how many tokens it has read."""

    position: Int[Array, "B"]  # tokens read of each example
    layers: list[Any]


class Decoder(nnx.Module):
    """Embedding, positions, blocks, final norm and output layer.

    `Decoder(config.Model(vocabulary=65), rngs=nnx.Rngs(0))` is the reference model of
    2,479,937 parameters.

    Raises:
        ValueError: sizes or choices that exclude each other, naming both.
    """

    length: int
    learned_positions: bool
    embedding: nnx.Embed
    blocks: nnx.List
    period: int  # blocks that a loop unrolls; 0: there is no loop
    final_norm: Any

    def __init__(self, options: config.Model, *, rngs: nnx.Rngs):
        transformer.check(options)
        if not config.is_causal(options):
            raise ValueError(
                f"model.kind {options.kind!r} is no Decoder, but an Encoder"
            )
        transformer.assemble(self, options, options.vocabulary, rngs)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        dropout_key: Array | None = None,
        watch: Callable | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T vocabulary"]:
        """Logits of the next token at every place, in float32.

        Args:
            dropout_key: a random key turns dropout on; None is evaluation.
            watch: is told what every layer does, as in `symjax.layers.Block`.
            segment_ids: tokens see only their own run of equal ids, in which positions
                start anew: outputs are those of each document alone. (The groups of
                flash stay those of the row.)
        Raises:
            ValueError: more tokens than learned positions.
        """
        x = self.hidden(
            tokens, dropout_key=dropout_key, watch=watch, segment_ids=segment_ids
        )
        return transformer.logits(self, x)

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        dropout_key: Array | None = None,
        watch: Callable | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """What the output layer is given; arguments and errors as of a call."""
        segments = None if segment_ids is None else segments_of(segment_ids)
        x = transformer.look_up(self, tokens)
        x = transformer.placed(self, x, jnp.zeros(1, jnp.int32), segments=segments)
        x = transformer.run_blocks(self, x, dropout_key, watch=watch, segments=segments)
        return self.final_norm(x)

    def init_cache(self, batch: int, length: int) -> Cache:
        """The cache before the first token, for at most `length` tokens."""
        layers = [block.init_cache(batch, length) for block in self.blocks]
        return Cache(jnp.zeros(batch, jnp.int32), layers)

    def decode(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache,
        lengths: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B T vocabulary"], Cache]:
        """Logits after each of the next tokens, and the cache that has read them.

        A token costs one decoding step; earlier tokens are not computed again.

        Args:
            lengths: how many of each row's tokens exist; the rest of the row is
                padding, which is not read and whose logits mean nothing. None: all.
        Raises:
            ValueError: more tokens than the cache or learned positions have room
                for. Under `jax.jit` the tokens of one call are counted, not those
                read before.
        """
        hidden, cache = self.read(tokens, cache, lengths)
        return transformer.logits(self, hidden), cache

    def read(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache,
        lengths: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Hidden states for the output layer in place of logits; else as `decode`."""
        count = tokens.shape[1]
        padding_mask = None
        if lengths is not None:
            padding_mask = jnp.arange(count)[None] < lengths[:, None]
        x = transformer.look_up(self, tokens)
        x = transformer.placed(self, x, cache.position, padding_mask)
        layers = []
        for block, state in zip(self.blocks, cache.layers, strict=True):
            x, state = block.decode(x, state, cache.position, padding_mask)
            layers.append(state)
        read = cache.position + (count if lengths is None else lengths)
        return self.final_norm(x), Cache(read, layers)
