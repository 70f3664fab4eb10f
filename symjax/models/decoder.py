"""Decoder: a causal language model over any attention mechanism."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from symjax import config
from symjax.layers.segments import segments_of
from symjax.models import transformer


class Cache(NamedTuple):
    """Decoding cache of a model."""

    position: Int[Array, "B"]  # number of tokens read, for each example
    layers: list[Any]  # the decoding state of each block


class Decoder(nnx.Module):
    """Embedding, positions, blocks, final norm and output layer.

    `Decoder(config.Model(vocabulary=65), rngs=nnx.Rngs(0))`, the reference model, has
    2,479,937 parameters.

    Raises:
        ValueError: sizes or choices that exclude each other, naming both.
    """

    length: int
    learned_positions: bool
    embedding: nnx.Embed
    blocks: nnx.List
    period: int  # blocks per iteration if model.scan_layers loops over them, else 0
    final_norm: Any

    def __init__(self, options: config.Model, *, rngs: nnx.Rngs):
        transformer.check(options)
        if not config.is_causal(options):
            raise ValueError(
                f"model.kind {options.kind!r} needs an Encoder, not a Decoder"
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
        """Return the logits of the next token at each position, in float32.

        Args:
            dropout_key: turns dropout on, as in training.
            watch: function that is called in each block, as in `symjax.layers.Block`.
            segment_ids: consecutive tokens with equal ids are one document. A token
                sees only its own document, and positions begin at 0 in each document.
                Outputs are those of each document alone, except with the mechanism
                flash, whose groups of tokens do not restart with a document.
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
        """Return the input of the output layer; arguments and errors as `__call__`."""
        segments = None if segment_ids is None else segments_of(segment_ids)
        x = transformer.look_up(self, tokens)
        x = transformer.with_positions(
            self, x, jnp.zeros(1, jnp.int32), segments=segments
        )
        x = transformer.run_blocks(self, x, dropout_key, watch=watch, segments=segments)
        return self.final_norm(x)

    def init_cache(self, batch: int, length: int) -> Cache:
        """Return the cache before the first of at most `length` tokens."""
        layers = [block.init_cache(batch, length) for block in self.blocks]
        return Cache(jnp.zeros(batch, jnp.int32), layers)

    def decode(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache,
        lengths: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B T vocabulary"], Cache]:
        """Read the next tokens; return (logits after each of them, new cache).

        Earlier tokens are not computed again.

        Args:
            lengths: number of tokens of each row that exist. The rest of the row is
                padding: it is not read, and its logits mean nothing. By default all
                exist.
        Raises:
            ValueError: more tokens than fit the cache or the learned positions. Under
                `jax.jit` only the tokens of one call are counted.
        """
        hidden, cache = self.read(tokens, cache, lengths)
        return transformer.logits(self, hidden), cache

    def read(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache,
        lengths: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Read the next tokens as `decode`, with hidden states in place of logits."""
        count = tokens.shape[1]
        padding_mask = None
        if lengths is not None:
            padding_mask = jnp.arange(count)[None] < lengths[:, None]
        x = transformer.look_up(self, tokens)
        x = transformer.with_positions(self, x, cache.position, padding_mask)
        layers = []
        for block, state in zip(self.blocks, cache.layers, strict=True):
            x, state = block.decode(x, state, cache.position, padding_mask)
            layers.append(state)
        read = cache.position + (count if lengths is None else lengths)
        return self.final_norm(x), Cache(read, layers)
