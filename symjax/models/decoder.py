"""The decoder: a causal language model over any attention mechanism."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from symjax import attention, config, validation
from symjax.layers.block import Block
from symjax.layers.cache import check_room
from symjax.layers.gau import GatedBlock
from symjax.layers.linear import Linear
from symjax.layers.norms import norm
from symjax.layers.remat import rematerialised
from symjax.layers.sharded import BATCH, constrain
from symjax.layers.universal import UniversalBlock
from symjax.models.scanned import run_scanned


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
        validation.check(options, "model.")
        if options.vocabulary < 1:
            raise ValueError("model.vocabulary must be at least 1, got 0")
        if options.dropout >= 1:
            raise ValueError(f"model.dropout must be below 1, got {options.dropout}")
        _check_unused(options)
        self.length = options.length
        # A universal block does this itself, step by step.
        self.remat = options.remat if options.kind == "decoder" else "none"
        self.period = max(1, len(options.pattern)) if options.scan_layers else 0
        self.learned_positions = options.positions == "learned"
        self.sinusoidal_positions = options.positions == "sinusoidal"
        self.dtype = jnp.dtype(options.dtype)
        draw = nnx.initializers.normal(0.02)
        self.embedding = nnx.Embed(
            options.vocabulary,
            options.width,
            embedding_init=draw,
            dtype=self.dtype,
            rngs=rngs,
        )
        if self.learned_positions:
            shape = (options.length, options.width)
            self.positions = nnx.Param(draw(rngs.params(), shape))
        self.blocks = nnx.List(_blocks(options, rngs))
        self.final_norm = norm(
            options.norm,
            options.width,
            bias=options.bias,
            dtype=self.dtype,
            rngs=rngs,
        )
        self.tied = options.tie_embeddings
        if not self.tied:
            self.head = Linear(
                options.width,
                options.vocabulary,
                use_bias=options.bias,
                dtype=self.dtype,
                rngs=rngs,
            )
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
        keys = [None] * len(self.blocks)
        if dropout_key is not None:
            first, *keys = jax.random.split(dropout_key, len(self.blocks) + 1)
            x = self.dropout(x, deterministic=False, rngs=first)
        if self.period:
            x = run_scanned(
                list(self.blocks),
                x,
                keys,
                period=self.period,
                remat=self.remat,
                dtype=self.dtype,
            )
            return self._scores(x)
        run = rematerialised(_run, self.remat)
        for block, key in zip(self.blocks, keys, strict=True):
            x = run(block, x, key)
        return self._scores(x)

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
        count = tokens.shape[1]
        positions = read[:, None] + jnp.arange(count)[None]
        table = self.embedding.embedding[...].astype(self.dtype)
        # The lookup of a table split over features makes XLA rematerialise it.
        x = jnp.take(constrain(table, None, None), tokens, axis=0)
        if self.learned_positions:
            named = f"model.length {self.length} learned positions"
            check_room(self.length, named, read, count, present)
            if present is not None:  # filling has no position, nor needs one
                positions = jnp.where(present, positions, 0)
            rows = jnp.take(self.positions[...], positions, axis=0)
            x = x + rows.astype(self.dtype)
        if self.sinusoidal_positions:  # as large as the embeddings, as in the paper
            rows = attention.sinusoidal(positions, x.shape[-1])
            x = x * x.shape[-1] ** 0.5 + rows.astype(self.dtype)
        return constrain(x, BATCH, "sequence", None)

    def _scores(self, x: Array) -> Array:
        x = self.final_norm(x)
        scores = self.embedding.attend(x) if self.tied else self.head(x)
        return scores.astype(jnp.float32)


def _check_unused(options: config.Model) -> None:
    """Refuse a key that the model would not look at."""
    turned = options.positions in ("rope", "rope_interleaved")
    for name, used, owner in (
        ("rope_base", turned, "positions"),
        ("rope_share", turned, "positions"),
        ("ponder", options.kind == "universal", "kind"),
        ("scan_layers", options.kind == "decoder", "kind"),
    ):
        value, chosen = getattr(options, name), getattr(options, owner)
        if not used and value != getattr(config.Model(), name):
            raise ValueError(
                f"model.{name} {value!r} has no meaning: model.{owner} is {chosen!r}"
            )
    if options.scan_layers and options.depth % max(1, len(options.pattern)):
        raise ValueError(
            f"model.scan_layers repeats the whole model.pattern: model.depth "
            f"{options.depth} is no multiple of its {len(options.pattern)} mechanisms"
        )


def _blocks(options: config.Model, rngs: nnx.Rngs) -> list[Any]:
    """The blocks by depth; a universal model has one, which it repeats by itself."""
    if options.kind == "universal":
        return [UniversalBlock(options, rngs=rngs)]
    mechanisms = [config.mechanism_of(options, x) for x in range(options.depth)]
    return [
        (GatedBlock if name in config.GATED else Block)(options, depth, rngs=rngs)
        for depth, name in enumerate(mechanisms)
    ]


def _run(block: Any, x: Array, key: Array | None) -> Array:
    return block(x, dropout_key=key)
