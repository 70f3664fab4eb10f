"""The optimizer, its learning rate and its guard, by the names of the configuration.

Layers that are alike as one stack, so that an optimizer is one program for them.

The weights of 20 layers and their moments are hundreds of arrays, and each would have
its own update for the compiler to fuse, place and schedule. Stacked they are as many
as those of one layer. States and checkpoints keep the layers apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jaxtyping import Array, Float, Int

from symjax import config, validation

MEMORY = 0.98  # of the running mean of gradient norms: the last 50 steps
MUON_MOMENTUM = 0.95  # with Nesterov's step ahead
ADAMW_RMS = 0.2  # of AdamW's updates, in units of the learning rate
ENOUGH = 20  # steps, before which no norm counts as unusual
EMBEDDINGS = ("embedding", "positions", "patches", "head")


def optimizer(
    options: config.Optimizer, steps: int, params_abstract: Any
) -> optax.GradientTransformation:
    """Clip the whole gradient, step by the schedule; skip harmful steps (`guarded`).

    `adamw` and `lion` shrink the weights themselves; `adam` and `sgd` add
    weight_decay · weight to the clipped gradient, as PyTorch's do. `muon` moves the
    matrices of blocks by their momentum made orthogonal, in steps of AdamW's size, so
    that rate and decay are those of AdamW, which moves all other weights, and
    convolutions over taps. Embeddings and the output layer may have a rate and a decay
    of their own. Moments have the paths and shapes of the weights, and so has their
    mean over time if `ema` asks for one.

    | name        | betas                         | eps    |
    |-------------|-------------------------------|--------|
    | adamw, adam | both moments                  | used   |
    | lion        | both, of its one moment       | unused |
    | sgd         | the first: its momentum       | unused |
    | muon        | both moments of AdamW's part; | used   |
    |             | its own momentum is 0.95      |        |

    Args:
        steps: of the run, where `decay_steps` is 0.
        params_abstract: nested dict of what has a shape; decides which weights decay.
    Raises:
        ValueError: a number is out of its range, or a name is unknown.
    Source: of muon, Jordan et al. 2024, kellerjordan.github.io/posts/muon; its scale,
        Liu et al. 2025, arXiv:2502.16982.
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
    chain += _moved(options, schedule(options, steps), params_abstract)
    if options.ema:
        chain.append(averaged(options.ema, corrected=options.version > 1))
    return guarded(optax.chain(*chain), options.spike)


def _moved(
    options: config.Optimizer, rate: optax.Schedule, params: Any
) -> list[optax.GradientTransformation]:
    """The transformations that move the weights, one for each group of weights."""
    rest = "adamw" if options.name == "muon" else options.name
    decay, own_decay = options.weight_decay, options.embedding_weight_decay
    own_decay = decay if own_decay == -1 else own_decay
    factor, mask = options.embedding_learning_rate, decays(params)
    groups = {rest: _by_name(rest, options, rate, decay, mask)}
    if options.name == "muon":
        groups["muon"] = _by_name("muon", options, rate, decay, mask)
    if (factor, own_decay) != (1, decay):
        groups["embeddings"] = _by_name(
            rest, options, lambda step: factor * rate(step), own_decay, mask
        )
    if len(groups) == 1:
        return groups[rest]
    by_label: dict[Hashable, optax.GradientTransformation] = {
        name: found[0] if len(found) == 1 else optax.chain(*found)
        for name, found in groups.items()
    }
    labels = _labels(params, rest, by_label, convolutions=options.version == 1)
    return [optax.partition(by_label, labels)]


def _by_name(
    name: str, options: config.Optimizer, rate: optax.Schedule, decay: float, mask: Any
) -> list[optax.GradientTransformation]:
    """The optimizer of a name. Args: mask: which weights decay."""
    (first, second), eps = options.betas, options.eps
    decayed = {"weight_decay": decay, "mask": mask}
    match name:
        case "adamw":
            return [optax.adamw(rate, first, second, eps, **decayed)]
        case "lion":
            return [optax.lion(rate, first, second, **decayed)]
        case "muon":  # of matrices alone
            return [
                optax.contrib.muon(
                    rate,
                    beta=MUON_MOMENTUM,
                    weight_decay=decay,
                    weight_decay_mask=mask,
                    muon_weight_dimension_numbers=_matrices,
                    consistent_rms=ADAMW_RMS,
                )
            ]
        case "adam":
            moved = optax.adam(rate, first, second, eps)
        case _:
            moved = optax.sgd(rate, momentum=first or None)
    return [optax.add_decayed_weights(**decayed), moved]


def _matrices(params: Any) -> Any:
    """Of each array the axes of a matrix: the last two, also in a stack of layers."""
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    return jax.tree.map(lambda _: axes, params)


def schedule(options: config.Optimizer, steps: int) -> optax.Schedule:
    """Return the function from steps taken (0: none) to the rate of the next step.

    Step n of a warm-up of w steps has n/w of the peak, `learning_rate`. From step w, or
    from step 1 without a warm-up, the rate falls to the end, `final` times the peak. It
    is there in step `decay_steps`, or in the last of the run if that is 0, and stays.

    `wsd` warms up, stays at the peak, and decays linearly in the last `cooldown` steps;
    without any the end begins after `decay_steps`. More steps delay the decay and
    change no rate before it, so that a run can be extended from a checkpoint that is
    older than its decay. Source: Hu et al. 2024, arXiv:2404.06395; Hägele et al. 2024,
    arXiv:2405.18392.

    Runs of `version` 1 count from step 0, which has the rate 0 in a warm-up; their last
    step is the one before the end.

    Args:
        options: checked by `optimizer`.
    Raises:
        ValueError: there are too few steps for the warm-up and the cool-down.
    """
    name, length = options.schedule, options.decay_steps or steps
    if length < 1:
        raise ValueError(f"steps {steps} must be at least 1")
    if name == "wsd" and 0 < options.warmup < 1:
        raise ValueError(
            f"optimizer.warmup {options.warmup} is a share of the steps, and would "
            "change when they are extended: optimizer.schedule=wsd needs a number of "
            f"steps, for instance {math.ceil(options.warmup * length)}"
        )
    warmed = name.startswith("warmup_") or name == "wsd"
    warmup = _steps(options.warmup, length) if warmed else 0
    if name == "warmup_cosine_decay_schedule" and warmup >= length:
        raise ValueError(
            f"optimizer.warmup {warmup} must be less than the {length} steps "
            "after which optimizer.schedule has reached its end"
        )
    first = 0 if options.version == 1 else 1
    warmup = max(warmup, first)
    rising = optax.linear_schedule(0.0, options.learning_rate, warmup)
    parts = [rising, _after_warmup(options, length, warmup)]
    rate = optax.join_schedules(parts, [warmup])
    return lambda taken: rate(taken + first)


def _after_warmup(
    options: config.Optimizer, length: int, warmup: int
) -> optax.Schedule:
    """Return the schedule from the last step of the warm-up on, which has the peak."""
    peak, left = options.learning_rate, max(length - warmup, 1)
    end = peak * options.final
    match options.schedule:
        case "cosine_decay_schedule" | "warmup_cosine_decay_schedule":
            return optax.cosine_decay_schedule(peak, left, alpha=options.final)
        case "linear_schedule":
            return optax.linear_schedule(peak, end, left)
        case "wsd":
            return _stable_decay(options, length, warmup)
        case _:
            return optax.constant_schedule(peak)


def _stable_decay(
    options: config.Optimizer, length: int, warmup: int
) -> optax.Schedule:
    peak, cooldown = options.learning_rate, _steps(options.cooldown, length)
    if _steps(options.warmup, length) + cooldown > length:
        raise ValueError(
            f"optimizer.warmup {warmup} and optimizer.cooldown {cooldown} must not "
            f"be more than the {length} steps of optimizer.schedule=wsd"
        )
    end = peak * options.final
    falling, start = optax.linear_schedule(peak, end, cooldown), length - cooldown
    if not cooldown:
        falling, start = optax.constant_schedule(end), length + 1
        if options.version == 1:  # it never came to its end
            return optax.constant_schedule(peak)
    stable = optax.constant_schedule(peak)
    return optax.join_schedules([stable, falling], [start - warmup])


def schedule_change(
    saved: config.Config, options: config.Config, taken: int
) -> str | None:
    """One line where other `steps` change the learning rate of a step to come.

    It names the step that both have and where the rates differ most. That wsd decays
    later with more steps is no change.

    Args:
        taken: the steps that the schedule has made.
    """
    last, hint = min(saved.steps, options.steps), ""
    before, now = saved.optimizer.schedule, options.optimizer.schedule
    if before == now == "wsd" and options.steps > saved.steps:
        last -= _steps(saved.optimizer.cooldown, last)
        if taken == last:  # the next step would be the first of the decay
            return None
        if taken > last:
            hint = (
                f" (the rate has decayed since step {last}: if a checkpoint up to then "
                "is kept, remove the newer ones to continue without this jump)"
            )
    elif now != "wsd" and saved.optimizer == options.optimizer:
        hint = " (optimizer.schedule=wsd can be extended)"
    ahead = np.unique(np.linspace(taken, max(taken, last - 1), 1000).astype(int))
    old, new = (
        np.broadcast_to(schedule(each.optimizer, each.steps)(ahead), ahead.shape)
        for each in (saved, options)
    )
    change = np.abs(new - old) / np.maximum(np.maximum(old, new), 1e-30)
    most = int(change.argmax())
    if change[most] < 1e-5:
        return None
    return (
        f"learning rate of step {ahead[most] + 1}: {new[most]:.3g} with steps "
        f"{options.steps}, was {old[most]:.3g} with steps {saved.steps}{hint}"
    )


def _steps(given: float, length: int) -> int:
    """A number of steps, or below 1 a share of all."""
    return round(given * length if given < 1 else given)


class Guarded(NamedTuple):
    """The state of a guarded optimizer."""

    taken: Int[Array, ""]
    skipped: Int[Array, ""]
    norm: Float[Array, ""]  # Σ (1 − MEMORY) MEMORYᵏ |g| over the steps taken
    inner: Any


def guarded(
    transform: optax.GradientTransformation, spike: float
) -> optax.GradientTransformation:
    """`transform`, but a harmful step changes nothing except the count of such steps.

    Harmful is a gradient whose norm is not finite or, where `spike` is above 0, larger
    than spike times the running mean of the norms of the steps taken. A skipped step
    does not move the schedule either.

    Cost: the norm, which clipping needs too, and one selection per weight and moment,
    which the compiler fuses with their update.
    """

    def init(params: Any) -> Guarded:
        zero = jnp.zeros((), jnp.int32)
        return Guarded(zero, zero, jnp.zeros(()), transform.init(params))

    def update(gradient: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = optax.tree.norm(gradient)
        good = jnp.isfinite(norm)
        if spike:
            usual = state.norm / (1 - MEMORY ** jnp.maximum(state.taken, 1))
            good &= (state.taken < ENOUGH) | (norm <= spike * usual)
        updates, inner = transform.update(gradient, state.inner, params)
        mean = MEMORY * state.norm + (1 - MEMORY) * norm
        new = Guarded(state.taken + 1, state.skipped, mean, inner)
        old = state._replace(skipped=state.skipped + 1)
        none = jax.tree.map(jnp.zeros_like, updates)
        return jax.tree.map(
            lambda one, other: jnp.where(good, one, other), (updates, new), (none, old)
        )

    return optax.GradientTransformation(init, cast(optax.TransformUpdateFn, update))


def state_layout(options: config.Config) -> Any:
    """The structure of the optimizer's state, of a model with an embedding and a block.

    Where two are equal, an optimizer continues from the state of the other.
    """
    kernel = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    params = {"embedding": kernel, "blocks": {"kernel": kernel}}
    chosen = optimizer(options.optimizer, options.steps, params)
    return jax.tree.structure(jax.eval_shape(chosen.init, params))


class Averaged(NamedTuple):
    """State of `averaged`.

    Attributes:
        average: of the weights.
        count: the steps that it is an average of; nothing if it is not corrected.
    """

    average: Any
    count: Any = ()


def averaged(decay: float, *, corrected: bool = True) -> optax.GradientTransformation:
    """Change no update, and keep an exponential moving average of the weights.

    a_t = Σ_{s≤t} decay^{t−s} w_s / Σ_{s≤t} decay^{t−s} over the weights w_s after the
    steps that were taken, which needs no first weights: after one step it is w_1.

    Args:
        corrected: False, as of runs of `version` 1: a_t = decay · a_{t−1} +
            (1 − decay) · w_t from the first weights on, of which decayᵗ stays.
    Source: Polyak & Juditsky 1992; exponential, for instance in arXiv:2006.11239; the
        correction as in Kingma & Ba 2014, arXiv:1412.6980, section 3.
    """

    def init(params: Any) -> Averaged:
        return Averaged(params, jnp.zeros((), jnp.int32) if corrected else ())

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Averaged]:
        weights, share, count = optax.apply_updates(params, updates), 1 - decay, ()
        if corrected:
            count = state.count + 1
            share /= -jnp.expm1(count * math.log(decay))  # 1 − decayᵗ, to its digits
        average = optax.incremental_update(weights, state.average, share)
        return updates, Averaged(average, count)

    return optax.GradientTransformation(init, cast(optax.TransformUpdateFn, update))


def average_of(state: Any) -> Any:
    """The averaged weights in the state of an optimizer with `ema`."""
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Averaged))
    return next(x.average for x in leaves if isinstance(x, Averaged))


def decays(params: Any) -> Any:
    """Which weights decay: a tree of booleans.

    Kernels, embeddings and the metrics of pairwise attention: what has two axes or
    more. Norms, biases and λ vectors do not, whatever their shape: in a stack of layers
    a vector has two axes as well.
    """

    def decays_at(path: Any, leaf: Any) -> bool:
        parts = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        kept = parts[-1] in ("bias", "scale") or any(
            word in part for part in parts for word in ("norm", "lambda")
        )
        return len(leaf.shape) >= 2 and not kept

    return jax.tree_util.tree_map_with_path(decays_at, params)


def _labels(
    params: Any, rest: str, groups: Container[Hashable], *, convolutions: bool = False
) -> Any:
    """Return the group of each weight.

    Of muon the kernels of blocks that are matrices, with more than one row and column;
    of embeddings tokens, positions and patches of images, and the output layer.

    Args:
        convolutions: muon has kernels [taps channels], as in runs of `version` 1. They
            are no matrices: every channel has a filter of its own.
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
    """Where equal layers stand among the blocks of a model.

    Attributes:
        depth: the number of blocks.
        period: the same place of another period has weights of the same shapes; 0: no
            layers are stacked.
    """

    depth: int
    period: int

    def stack(self, tree: Any) -> Any:
        """Arrays [layers of a place, ...] under `blocks`, by place in a period."""

        def stacked(blocks: dict[int, Any], place: int) -> Any:
            alike = [blocks[i] for i in range(place, self.depth, self.period)]
            return jax.tree.map(lambda *layers: jnp.stack(layers), *alike)

        return self._map(tree, stacked, self.period)

    def split(self, tree: Any) -> Any:
        """The layers of `stack(tree)` apart, as they were."""

        def layer(stacks: dict[int, Any], i: int) -> Any:
            index, place = divmod(i, self.period)
            return jax.tree.map(lambda stack: stack[index], stacks[place])

        return self._map(tree, layer, self.depth)

    def first(self, tree: Any) -> Any:
        """`tree` with the layers of the first period alone, one for each stack."""
        return self._map(tree, lambda blocks, place: blocks[place], self.period)

    def _map(self, tree: Any, choose: Callable, count: int) -> Any:
        """`tree` with count entries choose(blocks, i) in place of any `blocks`."""

        def of_weights(x: Any) -> bool:
            return isinstance(x, dict) and "blocks" in x

        def chosen(x: Any) -> Any:
            if not of_weights(x):
                return x
            return {**x, "blocks": {i: choose(x["blocks"], i) for i in range(count)}}

        return jax.tree.map(chosen, tree, is_leaf=of_weights) if self.period else tree
