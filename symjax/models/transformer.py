"""Embedding, positions, blocks and output layer of decoders and encoders."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from symjax import attention, config, validation
from symjax.attention.rope_scaling import OF_A_LENGTH, SCALED
from symjax.layers.block import Block, run_of
from symjax.layers.gau import GatedBlock
from symjax.layers.mixer import check_room
from symjax.layers.norms import norm
from symjax.layers.primitives import Linear, dropout, features_last
from symjax.layers.segments import Segments
from symjax.layers.sharded import BATCH, constrain
from symjax.layers.universal import UniversalBlock
from symjax.models.scanned import run_scanned


def check(options: config.Model) -> None:
    """Raise if a value is out of range, or a key is set that the model does not use.

    Raises:
        ValueError: naming the key and its value.
    """
    validation.check(options, "model.")
    if options.dropout >= 1:
        raise ValueError(f"model.dropout must be below 1, got {options.dropout}")
    rotary = options.positions in ("rope", "rope_interleaved")
    for name, used, owner in (
        ("rope_base", rotary, "positions"),
        ("rope_share", rotary, "positions"),
        ("ponder", options.kind == "universal", "kind"),
        ("scan_layers", options.kind != "universal", "kind"),
        ("classes", options.kind == "encoder", "kind"),
        ("patch", options.kind == "encoder", "kind"),
        ("image", options.patch > 0, "patch"),
    ):
        value, chosen = getattr(options, name), getattr(options, owner)
        if not used and value != getattr(config.Model(), name):
            raise ValueError(
                f"model.{name} {value!r} has no meaning: model.{owner} is {chosen!r}"
            )
    _check_scaling(options.rope_scaling, rotary, options.positions)
    if options.scan_layers and options.depth % max(1, len(options.pattern)):
        raise ValueError(
            f"model.scan_layers repeats the whole model.pattern: model.depth "
            f"{options.depth} is no multiple of its {len(options.pattern)} mechanisms"
        )
    if options.vocabulary < 1 and not options.patch:
        raise ValueError("model.vocabulary must be at least 1, got 0")


# Key of model.rope_scaling → the kinds of scaling that use it.
SCALED_BY = {
    "factor": SCALED,
    "original_length": OF_A_LENGTH,
    "low_frequency_factor": ("llama3",),
    "high_frequency_factor": ("llama3",),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "attention_factor": ("yarn",),
    "truncate": ("yarn",),
}


def _check_scaling(chosen: config.RopeScaling, rotary: bool, positions: str) -> None:
    """Raise if a key of model.rope_scaling is set but not used, or is missing."""
    if chosen.kind != "none" and not rotary:
        raise ValueError(
            f"model.rope_scaling.kind {chosen.kind!r} has no meaning: model.positions "
            f"is {positions!r}"
        )
    for name, kinds in SCALED_BY.items():
        value, unset = (getattr(x, name) for x in (chosen, config.RopeScaling()))
        if value != unset and chosen.kind not in kinds:
            raise ValueError(
                f"model.rope_scaling.{name} {value!r} has no meaning: "
                f"model.rope_scaling.kind is {chosen.kind!r}"
            )
    if chosen.kind in OF_A_LENGTH and not chosen.original_length:
        raise ValueError(
            f"model.rope_scaling.kind {chosen.kind!r} needs "
            "model.rope_scaling.original_length, the length of rows before the scaling"
        )


def assemble(model: Any, options: config.Model, outputs: int, rngs: nnx.Rngs) -> None:
    """Add embedding, positions, blocks, final norm and output layer to a model.

    Args:
        outputs: number of logits per position.
    """
    shared = {"dtype": jnp.dtype(options.dtype), "rngs": rngs}
    draw = nnx.initializers.normal(options.embedding_scale)
    model.length, model.dtype = options.length, shared["dtype"]
    # A universal block applies remat itself, to every step.
    model.remat = "none" if options.kind == "universal" else options.remat
    model.period = max(1, len(options.pattern)) if options.scan_layers else 0
    model.learned_positions = options.positions == "learned"
    model.sinusoidal_positions = options.positions == "sinusoidal"
    if not options.patch:
        table = options.vocabulary, options.width
        model.embedding = nnx.Embed(*table, embedding_init=draw, **shared)
    if model.learned_positions:
        shape = options.length, options.width
        model.positions = nnx.Param(draw(rngs.params(), shape))
    model.blocks = blocks(options, rngs)
    bias = options.bias
    normed = {**shared, "bias": bias, "epsilon": options.norm_eps}
    model.final_norm = norm(options.norm, options.width, **normed)
    model.tied = options.tie_embeddings
    if not model.tied:
        model.head = Linear(options.width, outputs, use_bias=bias, **shared)
    model.dropout = options.dropout


def blocks(options: config.Model, rngs: nnx.Rngs) -> nnx.List:
    """Return the blocks by depth. A universal model has one, which repeats itself."""
    if options.kind == "universal":
        return nnx.List([UniversalBlock(options, rngs=rngs)])
    return nnx.List(block(options, depth, rngs) for depth in range(options.depth))


def block(options: config.Model, depth: int, rngs: nnx.Rngs) -> Block | GatedBlock:
    """Return the block at `depth`: a GatedBlock if its mechanism is gated."""
    mechanism = attention.MECHANISMS[config.mechanism_of(options, depth)]
    return (GatedBlock if mechanism.gated else Block)(options, depth, rngs=rngs)


def look_up(model: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Return the embeddings of tokens."""
    table = model.embedding.embedding[...].astype(model.dtype)
    # A table that is split over features is gathered first. Otherwise XLA
    # rematerialises it fully in the lookup.
    return jnp.take(constrain(table, None, None), tokens, axis=0)


def with_positions(
    model: Any,
    x: Float[Array, "B T D"],
    before: Int[Array, "#B"],
    padding_mask: Bool[Array, "B T"] | None = None,
    segments: Segments | None = None,
) -> Float[Array, "B T D"]:
    """Add positions (model.positions) to embeddings, and shard them over the mesh.

    Args:
        before: number of tokens before x: [B], one number per example, or [1] if all
            examples have the same.
        padding_mask: True for tokens that exist. By default all exist.
        segments: the documents of a row, in which positions restart.
    Raises:
        ValueError: more tokens than learned positions.
    """
    count = x.shape[1]
    positions = before[:, None] + jnp.arange(count)[None]
    if segments is not None:
        positions = segments.positions
    if model.learned_positions:
        room_name = f"model.length {model.length} learned positions"
        check_room(model.length, room_name, before, count, padding_mask)
        if padding_mask is not None:  # padding needs no position
            positions = jnp.where(padding_mask, positions, 0)
        rows = jnp.take(model.positions[...], positions, axis=0)
        x = x + rows.astype(x.dtype)
    if model.sinusoidal_positions:  # embeddings times √D: Vaswani et al. 2017
        rows = attention.sinusoidal(positions, x.shape[-1])
        x = x * x.shape[-1] ** 0.5 + rows.astype(x.dtype)
    return constrain(x, BATCH, "sequence", None)


def run_blocks(
    model: Any,
    x: Float[Array, "B T D"],
    dropout_key: Array | None,
    padding_mask: Bool[Array, "B T"] | None = None,
    watch: Callable | None = None,
    segments: Segments | None = None,
) -> Float[Array, "B T D"]:
    """Run x through the blocks of a model, one after another or as one loop.

    Args:
        model: has blocks, dropout, period, remat and dtype.
        padding_mask, watch, segments: as in `symjax.layers.Block`. With `watch` the
            blocks run one after another and nothing is rematerialised.
    """
    keys = [None] * len(model.blocks)
    if dropout_key is not None:
        first, *keys = jax.random.split(dropout_key, len(model.blocks) + 1)
        x = dropout(x, model.dropout, first)
    if model.period and watch is None:
        return run_scanned(model, x, keys, padding_mask, segments)
    run = run_of(model.remat, watch)
    for block, key in zip(model.blocks, keys, strict=True):
        x = run(block, features_last(x), padding_mask, segments, key)
    return x


def logits(model: Any, x: Float[Array, "B T D"]) -> Float[Array, "B T outputs"]:
    """Return the logits of hidden states, in float32."""
    function, weights = output_layer(model)
    return function(weights, x)


def output_layer(model: Any) -> tuple[Callable[[Any, Array], Array], Any]:
    """Return a function (weights, hidden) → logits in float32, and its weights.

    The weights are those of the head, or of the embedding if embeddings are tied.
    """
    tied = model.tied
    graph, weights = nnx.split(model.embedding if tied else model.head)

    def logits(weights: Any, x: Float[Array, "B T D"]) -> Float[Array, "B T outputs"]:
        layer = nnx.merge(graph, weights)
        found = (layer.attend if tied else layer)(x)
        return found.astype(jnp.promote_types(found.dtype, jnp.float32))

    return logits, weights
