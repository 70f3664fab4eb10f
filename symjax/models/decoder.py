"""The decoder: a causal language model over any attention mechanism."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from symjax import config
from symjax.layers.gau import GatedBlock
from symjax.layers.norms import norm
from symjax.models import trunk


class Memory(NamedTuple):
    """What a decoder remembers of the tokens read so far."""

    position: Int[Array, "B"]  # tokens read of each example
    layers: list[Any]


class Decoder(nnx.Module):
    """Embedding, positions, blocks, final norm and output layer.

    `Decoder(config.Model(vocabulary=65), rngs=nnx.Rngs(0))` is the reference model of
    2,479,937 parameters.

    Raises:
        ValueError: sizes or choices that exclude each other, naming both.
    """

    def __init__(self, options: config.Model, *, rngs: nnx.Rngs):
        trunk.check(options)
        if not config.is_causal(options):
            raise ValueError(
                f"model.kind {options.kind!r} is no Decoder, but an Encoder"
            )
        self.length = options.length
        # A universal block does this itself, step by step.
        self.remat = options.remat if options.kind == "decoder" else "none"
        self.period = max(1, len(options.pattern)) if options.scan_layers else 0
        self.learned_positions = options.positions == "learned"
        self.sinusoidal_positions = options.positions == "sinusoidal"
        self.dtype = jnp.dtype(options.dtype)
        self.embedding = trunk.embedding(options, rngs)
        if self.learned_positions:
            self.positions = trunk.learned_positions(options, rngs)
        self.blocks = trunk.blocks(options, rngs)
        self.final_norm = norm(
            options.norm,
            options.width,
            bias=options.bias,
            dtype=self.dtype,
            rngs=rngs,
        )
        self.tied = options.tie_embeddings
        if not self.tied:
            self.head = trunk.output(options, options.vocabulary, rngs)
        self.dropout = nnx.Dropout(options.dropout)

    def __call__(
        self, tokens: Int[Array, "B T"], *, dropout_key: Array | None = None
    ) -> Float[Array, "B T vocabulary"]:
        """Scores of the next token at every place, in float32.

        Args:
            dropout_key: a random key turns dropout on; None is evaluation.
        Raises:
            ValueError: more tokens than learned positions.
        """
        x = self._embed(tokens, jnp.zeros(1, jnp.int32))
        return self._scores(trunk.run_blocks(self, x, dropout_key))

    def calibrate(self, tokens: Int[Array, "B T"]) -> None:
        """Fit the statistics of adaptive random features (FAVOR++, FAVOR#) to a text.

        They are constants of the model. Take another text than those the model is
        judged on: of the same one they would tell earlier tokens about later ones.
        """
        x = self._embed(tokens, jnp.zeros(1, jnp.int32))
        for block in self.blocks:
            if not isinstance(block, GatedBlock):
                block.calibrate(x)
            x = block(x)

    def empty(self, batch: int, length: int) -> Memory:
        """The memory before the first token, for at most `length` tokens."""
        layers = [block.empty(batch, length) for block in self.blocks]
        return Memory(jnp.zeros(batch, jnp.int32), layers)

    def extend(
        self,
        tokens: Int[Array, "B T"],
        memory: Memory,
        lengths: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B T vocabulary"], Memory]:
        """Scores after each of the next tokens, and the memory that has read them.

        Costs one token's work a token; nothing before it is computed again.

        Args:
            lengths: how many of each row's tokens exist; the rest of the row is
                filling, which is not read and whose scores mean nothing. None: all.
        Raises:
            ValueError: more tokens than the memory or learned positions have room
                for. Under `jax.jit` the tokens of one call are counted, not those
                read before.
        """
        count = tokens.shape[1]
        present = None
        if lengths is not None:
            present = jnp.arange(count)[None] < lengths[:, None]
        x = self._embed(tokens, memory.position, present)
        layers = []
        for block, state in zip(self.blocks, memory.layers, strict=True):
            x, state = block.extend(x, state, memory.position, present)
            layers.append(state)
        read = memory.position + (count if lengths is None else lengths)
        return self._scores(x), Memory(read, layers)

    def _embed(self, tokens: Array, read: Array, present: Array | None = None) -> Array:
        """Args: read: how many tokens came before, of each example or of all."""
        return trunk.placed(self, trunk.look_up(self.embedding, tokens), read, present)

    def _scores(self, x: Array) -> Array:
        x = self.final_norm(x)
        scores = self.embedding.attend(x) if self.tied else self.head(x)
        return scores.astype(jnp.float32)
