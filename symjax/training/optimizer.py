"""The optimizer of a run: update rules, weight decay, average of weights and guard.

`optimizer` chains what the configuration names: clipping, an update rule for each group
of weights, and an average of the weights (`averaged`). `guarded` wraps the chain and
skips harmful steps.

With `model.scan_layers` the training step stacks the arrays of equal layers (`Stacks`)
before the update and splits them after it. So XLA compiles one update for all equal
layers, instead of one per layer. States and checkpoints keep the layers separate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import Array, Float, Int

from symjax import config, validation
from symjax.training.schedule import schedule

MEMORY = 0.98  # decay of the running mean of gradient norms: about 50 steps
MUON_MOMENTUM = 0.95  # Nesterov momentum
ADAMW_RMS = 0.2  # root mean square of AdamW's updates in units of the learning rate
ENOUGH = 20  # steps that must be taken before a gradient norm can be a spike
EMBEDDINGS = ("embedding", "positions", "patches", "head")


def optimizer(
    options: config.Optimizer, steps: int, params_abstract: Any
) -> optax.GradientTransformation:
    """Return the optimizer of a configuration, guarded against harmful steps.

    It clips the norm of the whole gradient to `clip`, then applies the rule `name`:

    - `adamw` and `lion` decay the weights directly.
    - `adam` and `sgd` add weight_decay · weight to the clipped gradient, as in PyTorch.
    - `muon` makes the momentum of each matrix of the blocks orthogonal. Its updates are
      scaled to the size of AdamW's, so AdamW's rates and decays fit. AdamW updates all
      other weights, including kernels of convolutions (`version` 1: Muon updates them).

    Embeddings and the output layer may have another rate and another decay. If `ema` is
    not 0, an average of the weights is kept. Moments and the average have the paths and
    shapes of the weights.

    | name        | betas                         | eps    |
    |-------------|-------------------------------|--------|
    | adamw, adam | both moments                  | used   |
    | lion        | both, for its one moment      | unused |
    | sgd         | the first is the momentum     | unused |
    | muon        | both moments of AdamW's part; | used   |
    |             | muon's own momentum is 0.95   |        |

    Args:
        steps: as in `schedule`.
        params_abstract: nested dict of arrays or abstract arrays. Their paths and
            shapes decide which weights decay and which rule each one has.
    Raises:
        ValueError: a number is out of its range, or a name is unknown.
    Source: muon, Jordan et al. 2024, kellerjordan.github.io/posts/muon; its scale, Liu
        et al. 2025, arXiv:2502.16982.
    """
    validation.check(options, "optimizer.")
    if not options.eps > 0:
        raise ValueError(f"optimizer.eps {options.eps} must be positive")
    if options.ema >= 1:
        raise ValueError(f"optimizer.ema {options.ema} must be below 1")
    first, second = options.betas
    if not (0 <= first < 1 and 0 <= second < 1):
        raise ValueError(f"optimizer.betas {options.betas} must be in [0, 1)")
    if -1 < options.embedding_weight_decay < 0:
        raise ValueError(
            f"optimizer.embedding_weight_decay {options.embedding_weight_decay} must "
            "be at least 0, or -1: as optimizer.weight_decay"
        )
    chain: list[optax.GradientTransformation] = []
    if options.clip:
        chain.append(optax.clip_by_global_norm(options.clip))
    chain += _updates(options, schedule(options, steps), params_abstract)
    if options.ema:
        chain.append(averaged(options.ema, corrected=options.version > 1))
    return guarded(optax.chain(*chain), options.spike)


def _updates(
    options: config.Optimizer, rate: optax.Schedule, params: Any
) -> list[optax.GradientTransformation]:
    """Return transformations that update each weight by the rule of its group."""
    main = "adamw" if options.name == "muon" else options.name
    decay, embedding_decay = options.weight_decay, options.embedding_weight_decay
    embedding_decay = decay if embedding_decay == -1 else embedding_decay
    factor, mask = options.embedding_learning_rate, weight_decay_mask(params)
    groups = {main: _update_rule(main, options, rate, decay, mask)}
    if options.name == "muon":
        groups["muon"] = _update_rule("muon", options, rate, decay, mask)
    if (factor, embedding_decay) != (1, decay):
        groups["embeddings"] = _update_rule(
            main, options, lambda step: factor * rate(step), embedding_decay, mask
        )
    if len(groups) == 1:
        return groups[main]
    by_label: dict[Hashable, optax.GradientTransformation] = {
        name: found[0] if len(found) == 1 else optax.chain(*found)
        for name, found in groups.items()
    }
    labels = _labels(params, main, by_label, convolutions=options.version == 1)
    return [optax.partition(by_label, labels)]


def _update_rule(
    name: str, options: config.Optimizer, rate: optax.Schedule, decay: float, mask: Any
) -> list[optax.GradientTransformation]:
    """Return the transformations of an update rule.

    Args:
        mask: tree of booleans, True for weights that decay.
    """
    (first, second), eps = options.betas, options.eps
    decayed = {"weight_decay": decay, "mask": mask}
    match name:
        case "adamw":
            return [optax.adamw(rate, first, second, eps, **decayed)]
        case "lion":
            return [optax.lion(rate, first, second, **decayed)]
        case "muon":  # its group has only matrices
            return [
                optax.contrib.muon(
                    rate,
                    beta=MUON_MOMENTUM,
                    weight_decay=decay,
                    weight_decay_mask=mask,
                    muon_weight_dimension_numbers=_matrix_axes,
                    consistent_rms=ADAMW_RMS,
                )
            ]
        case "adam":
            rule = optax.adam(rate, first, second, eps)
        case _:
            rule = optax.sgd(rate, momentum=first or None)
    return [optax.add_decayed_weights(**decayed), rule]


def _matrix_axes(params: Any) -> Any:
    """Return the axes of each matrix: the last two, also in a stack of layers."""
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    return jax.tree.map(lambda _: axes, params)


class Guarded(NamedTuple):
    """State of a guarded optimizer.

    Attributes:
        taken, skipped: numbers of steps.
        norm: exponential moving average of the gradients' norms over the steps taken,
            with factor MEMORY and start 0. Division by 1 − MEMORY^taken removes the
            bias of the start.
        inner: state of the optimizer itself.
    """

    taken: Int[Array, ""]
    skipped: Int[Array, ""]
    norm: Float[Array, ""]
    inner: Any


def guarded(
    transform: optax.GradientTransformation, spike: float
) -> optax.GradientTransformation:
    """Return an optimizer that skips harmful steps and makes the others by `transform`.

    A step is harmful if the norm of its gradient is not finite. It is also harmful if
    its gradient is a spike: the norm exceeds `spike` times the running mean over the
    steps taken, and at least `ENOUGH` steps were taken. If `spike` is 0, there are no
    spikes. A skipped step changes only the count of skipped steps: weights, moments and
    the position in the schedule stay.
    """

    def init(params: Any) -> Guarded:
        zero = jnp.zeros((), jnp.int32)
        return Guarded(zero, zero, jnp.zeros(()), transform.init(params))

    def update(gradient: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = optax.tree.norm(gradient)
        good = jnp.isfinite(norm)
        if spike:
            expected = state.norm / (1 - MEMORY ** jnp.maximum(state.taken, 1))
            good &= (state.taken < ENOUGH) | (norm <= spike * expected)
        updates, inner = transform.update(gradient, state.inner, params)
        mean = MEMORY * state.norm + (1 - MEMORY) * norm
        new = Guarded(state.taken + 1, state.skipped, mean, inner)
        old = state._replace(skipped=state.skipped + 1)
        none = jax.tree.map(jnp.zeros_like, updates)
        return jax.tree.map(
            lambda new, old: jnp.where(good, new, old), (updates, new), (none, old)
        )

    return optax.GradientTransformation(init, cast(optax.TransformUpdateFn, update))


def state_layout(options: config.Config) -> Any:
    """Return the structure of the optimizer's state for a minimal model.

    The model has one embedding and one block. A run can continue with another
    configuration only if the structures are equal.
    """
    kernel = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    params = {"embedding": kernel, "blocks": {"kernel": kernel}}
    chosen = optimizer(options.optimizer, options.steps, params)
    return jax.tree.structure(jax.eval_shape(chosen.init, params))


class Averaged(NamedTuple):
    """State of `averaged`.

    Attributes:
        average: average of the weights.
        count: number of steps in the average; () if the average is not corrected.
    """

    average: Any
    count: Any = ()


def averaged(decay: float, *, corrected: bool = True) -> optax.GradientTransformation:
    """Return a transformation that keeps an exponential moving average of the weights.

    a_t = Σ_{s≤t} decay^{t−s} w_s / Σ_{s≤t} decay^{t−s}, where w_s are the weights after
    the s-th step that was not skipped. The initial weights have no part in a_t. Updates
    pass unchanged.

    Args:
        corrected: False for runs of `version` 1: a_t = decay · a_{t−1} +
            (1 − decay) · w_t, where a_0 are the initial weights. Their share of a_t is
            decayᵗ.
    Source: Polyak & Juditsky 1992; the exponential form, for instance,
        arXiv:2006.11239; the correction, Kingma & Ba 2014, arXiv:1412.6980, section 3.
    """

    def init(params: Any) -> Averaged:
        return Averaged(params, jnp.zeros((), jnp.int32) if corrected else ())

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Averaged]:
        weights, share, count = optax.apply_updates(params, updates), 1 - decay, ()
        if corrected:
            count = state.count + 1
            # expm1, since 1 − decayᵗ would lose digits by cancellation.
            share /= -jnp.expm1(count * math.log(decay))  # 1 − decayᵗ
        average = optax.incremental_update(weights, state.average, share)
        return updates, Averaged(average, count)

    return optax.GradientTransformation(init, cast(optax.TransformUpdateFn, update))


def average_of(state: Any) -> Any:
    """Return the averaged weights from the state of an optimizer with `ema`."""
    leaves = jax.tree.leaves(state, is_leaf=_is_average)
    return next(x.average for x in leaves if _is_average(x))


def with_averages(state: Any, change: Callable[[Any], Any]) -> Any:
    """Return the state of an optimizer after applying `change` to its average."""

    def changed(x: Any) -> Any:
        return x._replace(average=change(x.average)) if _is_average(x) else x

    return jax.tree.map(changed, state, is_leaf=_is_average)


def _is_average(x: Any) -> bool:
    return isinstance(x, Averaged)


def weight_decay_mask(params: Any) -> Any:
    """Return a tree of booleans: whether weight decay acts on each weight.

    Weights with two axes or more decay: kernels, embeddings, the matrices U of pairwise
    keys and those of the feature maps "hedgehog" and "t2r". Biases, scales, and weights
    with "norm" or "lambda" in their path do not decay, whatever their shape. Weights
    with "lambda" are the vectors of differential V1 (such as `lambda_query_1`) and the
    projection that computes λ in V2 (`lambda_projection`).
    """

    def is_decayed(path: Any, leaf: Any) -> bool:
        parts = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        excluded = parts[-1] in ("bias", "scale") or any(
            word in part for part in parts for word in ("norm", "lambda")
        )
        return len(leaf.shape) >= 2 and not excluded

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def _labels(
    params: Any, rest: str, groups: Container[Hashable], *, convolutions: bool = False
) -> Any:
    """Return the name of the group of each weight: "muon", "embeddings" or `rest`.

    "muon" has the kernels of blocks that are matrices with more than one row and
    column. "embeddings" has the embeddings of tokens, positions and image patches, and
    the output layer.

    Args:
        rest: group of all other weights.
        groups: names of the groups that exist.
        convolutions: whether "muon" also has the kernels [taps channels] of
            convolutions, as in runs of `version` 1. Later versions exclude them: each
            channel has its own filter, so the kernel is not a matrix.
    """

    def label(path: Any, leaf: Any) -> str:
        parts = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if "embeddings" in groups and parts[0] in EMBEDDINGS:
            return "embeddings"
        inside = parts[0] == "blocks" and parts[-1] == "kernel"
        if not convolutions and any("convolution" in part for part in parts):
            inside = False
        matrix = inside and len(leaf.shape) == 2 and min(leaf.shape) > 1
        return "muon" if "muon" in groups and matrix else rest

    return jax.tree_util.tree_map_with_path(label, params)


class Stacks(NamedTuple):
    """Positions of equal layers among the blocks of a model.

    Layers i and i + period have weights of the same shapes, so a tree of weights can
    hold one stack [layers ...] for each position in a period.

    Attributes:
        depth: number of blocks.
        period: number of layers after which shapes repeat; 0 stacks no layers.
    """

    depth: int
    period: int

    def stack(self, tree: Any) -> Any:
        """Return `tree` with stacks of layers under `blocks`, one for each position."""

        def stacked(blocks: dict[int, Any], position: int) -> Any:
            alike = [blocks[i] for i in range(position, self.depth, self.period)]
            return jax.tree.map(lambda *layers: jnp.stack(layers), *alike)

        return self._map(tree, stacked, self.period)

    def split(self, tree: Any) -> Any:
        """Return the separate layers again: split(stack(tree)) equals `tree`."""

        def layer(stacks: dict[int, Any], i: int) -> Any:
            index, position = divmod(i, self.period)
            return jax.tree.map(lambda stack: stack[index], stacks[position])

        return self._map(tree, layer, self.depth)

    def first(self, tree: Any) -> Any:
        """Return `tree` with only the first period of layers, one for each stack."""
        return self._map(tree, lambda blocks, position: blocks[position], self.period)

    def norms(self, stacked: Any) -> Float[Array, " layers"]:
        """Return the norm of each layer of `stacked`, a gradient after `stack`."""
        blocks = stacked["blocks"]
        if not self.period:
            return jnp.stack([optax.tree.norm(blocks[i]) for i in range(self.depth)])

        def squares(stack: Any) -> Array:
            leaves = jax.tree.leaves(stack)
            parts = [jnp.square(x).sum(axis=range(1, x.ndim)) for x in leaves]
            return jnp.stack(parts).sum(axis=0)

        each = jnp.stack([squares(blocks[i]) for i in range(self.period)], axis=1)
        return jnp.sqrt(each.reshape(self.depth))

    def _map(self, tree: Any, choose: Callable, count: int) -> Any:
        """Return `tree` with choose(blocks, i) for i < count in place of all `blocks`.

        A tree may hold several copies of the weights' structure: moments, averages.
        """

        def has_blocks(x: Any) -> bool:
            return isinstance(x, dict) and "blocks" in x

        def replaced(x: Any) -> Any:
            if not has_blocks(x):
                return x
            return {**x, "blocks": {i: choose(x["blocks"], i) for i in range(count)}}

        return jax.tree.map(replaced, tree, is_leaf=has_blocks) if self.period else tree
