"""Attention maps and scores of the layers of a model, with any mechanism.

A layer attends with unit vectors as values, so that row t of its output is row t of its
map. The functions take the operands of a layer (`operands_of`) and are called inside
`jax.jit`. `statistics_of_maps` reduces the maps of all layers to a few numbers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange, repeat
from flax import nnx
from jaxtyping import Array, Bool, Float

from symjax.attention.core.operands import repeat_noise, signal_keys
from symjax.attention.scores.mechanism import row_map
from symjax.layers.mixer import Mixer
from symjax.layers.segments import Segments, positions_of, row_operands
from symjax.layers.sharded import Operand


def operands_of(
    layer: Any,
    x: Float[Array, "B T D"],
    padding_mask: Bool[Array, "B T"] | None = None,
    segments: Segments | None = None,
) -> dict[str, Operand]:
    """Return the operands with which a layer attends to its input x.

    Args:
        layer: an `Attention` or a `GatedBlock`.
        padding_mask: True for tokens that exist. By default all exist.
        segments: the documents of a row; None for a `GatedBlock`, which does not take
            them here.
    """
    positions = positions_of(x, segments)
    lengths = layer.rotate.lengths(positions, padding_mask, segments)
    options = {} if segments is None else {"segments": segments}
    operands = layer.operands(x, positions, lengths=lengths, **options)
    return operands | row_operands(padding_mask, segments)


def map_of(mixer: Mixer, operands: dict[str, Operand]) -> Float[Array, "B N T T"]:
    """Return the attention map: the output for values that are unit vectors.

    The option `implementation` is ignored, since some kernels do not take values of T
    features.

    Memory O(B N T²), and time O(T²) times the cost of one value feature.
    """
    value = operands["value"]
    batch, length, heads = value.array.shape[:3]
    shape = batch, length, heads, length
    units = jnp.broadcast_to(jnp.eye(length)[None, :, None], shape)
    units = operands | {"value": value._replace(array=units)}
    return jnp.swapaxes(mixer.without_implementation(units), 1, 2)


def in_own_pairs(
    mixer: Mixer, operands: dict[str, Operand]
) -> tuple[Mixer, dict[str, Operand]]:
    """Return mixer and operands in which no two heads share a noise map.

    Each head of grouped differential attention gets its own copy of the noise head, so
    the output is the same.
    """
    return mixer.repeat_noise(operands) if mixer.signals > 1 else (mixer, operands)


def by_branch(
    mixer: Mixer, query: Array, key: Array, value_heads: int
) -> tuple[Array, Array]:
    """Return queries and keys [B T Nk H] as [B N P T H], with shared heads repeated.

    P is the number of branches of a head: 2 if the layer is differential, else 1.
    """
    query = repeat_noise(query, mixer.signals)
    if mixer.signals > 1:
        key = repeat_noise(key, signal_keys(key.shape[2], value_heads))
    heads, kind = mixer.sizes.heads, mixer.differential
    return branches_of(query, heads, kind), branches_of(key, heads, kind)


def branches_of(x: Array, heads: int, kind: str) -> Array:
    """Reshape queries or keys [B T Nk H] to [B N P T H]; repeat shared heads."""
    if x.shape[2] < 2 * heads and kind == "v2":  # both branches share one key
        x = jnp.repeat(x, 2, axis=2)
    branches = 1 if kind == "none" else 2
    split = rearrange(x, "b t (k p) h -> b k p t h", p=branches)
    return repeat(split, "b k p t h -> b (k g) p t h", g=heads // split.shape[1])


def each_branch(
    compute: Callable[[dict[str, Operand]], Array],
    operands: dict[str, Operand],
    kind: str,
) -> Array:
    """Return compute(operands) [B N T T] for every branch, as [B N P T T].

    With λ = 0 a differential mechanism computes its first branch alone. If the operands
    of the branches are swapped, it computes the second branch.
    """
    if kind == "none":
        return compute(operands)[:, :, None]
    lam = operands["lam"]
    first = operands | {"lam": lam._replace(array=jnp.zeros_like(lam.array))}
    of_branches = ("BTN",) if kind == "v2" else ("BTN", "BSK", "BTK", "K")
    shared = "lam", "value", "length_scale"
    swapped = {
        name: operand._replace(array=_swap_branches(operand))
        for name, operand in first.items()
        if operand.axes in of_branches and name not in shared
    }
    return jnp.stack([compute(first), compute(first | swapped)], axis=2)


def _swap_branches(operand: Operand) -> Array:
    """Swap heads 2n and 2n + 1, the branches of one differential head."""
    x, axis = operand.array, len(operand.axes) - 1  # heads are the last letter
    pairs = x.reshape(*x.shape[:axis], -1, 2, *x.shape[axis + 1 :])
    return jnp.flip(pairs, axis=axis + 1).reshape(x.shape)


def scores_of_branches(
    mixer: Mixer, operands: dict[str, Operand]
) -> Float[Array, "B N P T T"] | None:
    """Return scaled q·k of each branch as attention computes it, 0 at hidden pairs.

    The result is None for mechanisms that compute no scores.
    """
    if not mixer.entry.keys or mixer.entry.state is not None:
        return None
    return each_branch(partial(_scores, mixer), operands, mixer.differential)


def _scores(mixer: Mixer, operands: dict[str, Operand]) -> Array:
    """Return the map of a score mechanism whose weights equal its scores."""
    names = ("window", "length_base", "length_scale", "mask_self")
    options: dict[str, Any] = {name: x for name, x in mixer.options if name in names}
    query, key = operands["query"].array, operands["key"].array
    if "lam" in operands:
        shape = (*query.shape[:2], query.shape[2] // 2)
        options["lam"] = jnp.broadcast_to(operands["lam"].array, shape)
        options["shared_keys"] = mixer.differential == "v2"
    for name in ("mask", "length_scale"):  # gates and biases are no part of scores
        if name in operands:
            options[name] = operands[name].array
    return row_map(_scores_as_weights, query, key, is_causal=mixer.causal, **options)


def _scores_as_weights(scores: Array, visible: Array | None) -> Array:
    return scores if visible is None else jnp.where(visible, scores, 0)


@partial(jax.jit, static_argnums=0)
def statistics_of_maps(
    graph: nnx.GraphDef, weights: Any, inputs: Array
) -> list[dict[str, Float[Array, ""]]]:
    """Return the entropy and the largest |score| of every layer, in one program.

    entropy        H = −Σ_s p_s ln p_s in nats of the shares p_s = |a_s| / Σ |a| of a
                   row of the map, the mean over heads and rows that exist
    largest_logit  the largest |scaled q·k| over heads, branches and visible pairs; only
                   of mechanisms that compute scores

    A universal model has an entry for each step. Memory O(B N T²) for one layer.

    Args:
        graph, weights: of a model, from `nnx.split`.
        inputs: token ids [B T], negative at padding, or images. Each row counts as one
            document.
    """
    model, found = nnx.merge(graph, weights), []

    def watch(layer: Any, x: Array, padding_mask: Array | None, _: Array) -> None:
        operands = operands_of(layer, x, padding_mask)
        exists = jnp.ones(x.shape[:2], bool) if padding_mask is None else padding_mask
        rows = _entropies(map_of(layer.mixer, operands))
        real = jnp.broadcast_to(exists[:, None], rows.shape)
        values = {"entropy": rows.mean(where=real)}
        scores = scores_of_branches(*in_own_pairs(layer.mixer, operands))
        if scores is not None:
            sizes = jnp.where(exists[:, None, None, :, None], jnp.abs(scores), 0)
            values["largest_logit"] = sizes.max().astype(jnp.float32)
        found.append(values)

    model(inputs, watch=watch)
    return found


def _entropies(weights: Float[Array, "B N T T"]) -> Float[Array, "B N T"]:
    """Return −Σ p ln p of every row in float32; 0 for a row of zeros."""
    sizes = jnp.abs(weights.astype(jnp.float32))
    total = sizes.sum(axis=-1, keepdims=True)
    shares = sizes / jnp.where(total == 0, 1, total)
    return -(shares * jnp.log(jnp.where(shares > 0, shares, 1))).sum(axis=-1)
