"""Gradients of the loss through the two branches of differential attention.

The input x of a differential layer changes the loss through the maps A₁ and A₂, and
through the values. Let G = ∂loss/∂A be the gradient of the map A = A₁ − λA₂ of a head.
Then

    g₁ = ∂/∂x Σ G · A₁(x)          the gradient through the first branch
    g₂ = ∂/∂x Σ G · (−λ A₂(x))     the gradient through the second branch

summed over heads, with G, λ and the values held constant. Their cosine says whether the
branches work against each other: below 0 a part of the two gradients cancels, above 0
they add up, so that a small change of x changes the loss more than through one branch.

Source: Takahashi et al. 2025, arXiv:2510.00517, who compare the gradients of A₁ and of
A₂. For λ > 0 their cosine has the opposite sign.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import repeat
from flax import nnx
from jaxtyping import Array, Float

from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.measures.windows import heldout_rows
from symjax.evaluation.results import Options, progress
from symjax.layers.mixer import Mixer
from symjax.layers.sharded import Operand
from symjax.models.attention_maps import (
    each_branch,
    in_own_pairs,
    map_of,
    operands_of,
)
from symjax.models.build import attentions
from symjax.training.loss import objective


def compared_branches(run: LoadedRun, options: Options) -> list[dict[str, Any]]:
    """Compare g₁ and g₂ of every differential layer, over a few held-out windows.

    Returns:
        for each differential layer "layer", the "cosine" of the gradients and the
        "ratio" of their lengths, |g₂| / |g₁|. The gradients of all windows count as one
        vector. Both numbers are None if one of the gradients is 0.
    """
    model, sums = run.model(), {}
    if not any(layer.mixer.differential != "none" for layer in attentions(model)):
        return []
    graph, weights = nnx.split(model)
    for inputs, targets in progress(heldout_rows(run, options), "windows"):
        found = branch_gradients(graph, weights, inputs[None], targets[None])
        for layer, (first, second) in found.items():
            first, second = (np.asarray(x, np.float64) for x in (first, second))
            products = (first * second, first * first, second * second)
            sums[layer] = sums.get(layer, 0) + np.array([x.sum() for x in products])
    rows = []
    for layer, (product, first, second) in sums.items():
        lengths = float(first**0.5), float(second**0.5)
        row = {"layer": layer, "cosine": None, "ratio": None}
        if all(lengths):
            row |= {"cosine": float(product) / (lengths[0] * lengths[1])}
            row |= {"ratio": lengths[1] / lengths[0]}
        rows.append(row)
    return rows


class Shifted:
    """A mixer whose n-th call adds the n-th of some arrays to its output.

    If the arrays are zeros, their gradients are those of the outputs.
    """

    def __init__(self, mixer: Mixer, shifts: Iterator[Float[Array, "B T N V"]]):
        self.mixer, self.shifts = mixer, shifts

    def __call__(self, operands: dict[str, Operand]) -> Float[Array, "B T N V"]:
        return self.mixer(operands) + next(self.shifts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mixer, name)


@partial(jax.jit, static_argnums=0)
def branch_gradients(
    graph: nnx.GraphDef, weights: Any, inputs: Array, targets: Array
) -> dict[int, tuple[Float[Array, "B T D"], Float[Array, "B T D"]]]:
    """Return (g₁, g₂) of the mean loss for every differential layer, by its index.

    A universal model has an entry for each step. Memory O(B N T²) per layer, and time
    O(B N T³), besides those of a training step.

    Args:
        graph, weights: of a model, from `nnx.split`.
        inputs, targets: a batch, as in training.
    """
    model = nnx.merge(graph, weights)
    layers = [x for x in attentions(model) if x.mixer.differential != "none"]
    read = []  # shapes [B T D] of what the layers read; a classifier's hidden has T = 1
    jax.eval_shape(
        lambda: model.hidden(inputs, watch=lambda _, x, *__: read.append(x.shape))
    )
    zeros = [jnp.zeros(_output_shape(x.mixer, *read[0][:2])) for x in layers]

    def loss(shifts: list[Array]) -> tuple[Array, list[Any]]:
        model, calls, rest = nnx.merge(graph, weights), [], iter(shifts)
        for layer in {id(x): x for x in attentions(model)}.values():
            if layer.mixer.differential != "none":
                layer.mixer = Shifted(layer.mixer, rest)

        def watch(_layer: Any, x: Array, padding_mask: Array | None, _: Array) -> None:
            calls.append((x, padding_mask))

        hidden = model.hidden(inputs, watch=watch)
        return objective(model, hidden, targets).minimised, calls

    gradients, calls = jax.grad(loss, has_aux=True)(zeros)
    rest, found = iter(gradients), {}
    for index, (layer, call) in enumerate(zip(attentions(model), calls, strict=True)):
        if layer.mixer.differential != "none":
            found[index] = _by_branch(layer, next(rest), *call)
    return found


def _output_shape(mixer: Mixer, batch: int, length: int) -> tuple[int, ...]:
    return batch, length, mixer.sizes.heads, mixer.sizes.value_size


def _by_branch(
    layer: Any, gradient: Float[Array, "B T N V"], x: Array, padding_mask: Array | None
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """Return (g₁, g₂) of a layer from the gradient for the output of its mixer."""

    def maps(x: Array) -> tuple[Float[Array, "B N P T T"], tuple[Array, Array]]:
        operands = operands_of(layer, x, padding_mask)
        constant = operands["value"].array, operands["lam"].array
        mixer, operands = in_own_pairs(layer.mixer, operands)
        weights = each_branch(partial(map_of, mixer), operands, mixer.differential)
        return weights.astype(jnp.float32), constant

    _, pull, (value, lam) = jax.vjp(maps, x, has_aux=True)
    heads = layer.mixer.sizes.heads
    value = repeat(value, "b s k v -> b s (k g) v", g=heads // value.shape[2])
    of_map = jnp.einsum("btnv,bsnv->bnts", gradient, value)
    lam = jnp.swapaxes(jnp.broadcast_to(lam, (*x.shape[:2], heads)), 1, 2)
    none = jnp.zeros_like(of_map)
    (first,) = pull(jnp.stack([of_map, none], axis=2))
    (second,) = pull(jnp.stack([none, -lam[..., None] * of_map], axis=2))
    return first, second
