"""The optimizer, its learning rate and its guard, by the names of the configuration."""

from __future__ import annotations

import math
from collections.abc import Container, Hashable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jaxtyping import Array, Float, Int

from symjax import config, validation

MEMORY = 0.98  # of the running mean of gradient norms: the last 50 steps
ADAMW_RMS = 0.2  # of AdamW's updates, in units of the learning rate
ENOUGH = 20  # steps, before which no norm counts as unusual
EMBEDDINGS = ("embedding", "positions", "patches", "head")


def optimizer(
    options: config.Optimizer, steps: int, params_abstract: Any
) -> optax.GradientTransformation:
    """Clip the whole gradient, step by the schedule; skip harmful steps (`guarded`).

    `adamw` and `lion` shrink the weights themselves; `adam` and `sgd` add
    weight_decay · weight to the clipped gradient, as PyTorch's do. `sgd` takes the
    first of `betas` as its momentum. `muon` moves the kernels of blocks by their
    momentum made orthogonal, in steps of AdamW's size, so that rate and decay are those
    of AdamW, which moves all other weights. Embeddings and the output layer may have a
    rate and a decay of their own. Moments have the paths and shapes of the weights, and
    so has their mean over time if `ema` asks for one.

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
        chain.append(averaged(options.ema))
    return guarded(optax.chain(*chain), options.spike)


def _moved(
    options: config.Optimizer, rate: optax.Schedule, params: Any
) -> list[optax.GradientTransformation]:
    """What moves the weights, each group of them by its own where there are several."""
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
    return [optax.partition(by_label, _labels(params, rest, by_label))]


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
        case "muon":  # of matrices alone, all of which decay
            return [
                optax.contrib.muon(
                    rate,
                    weight_decay=decay,
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
    """Step (from 0) → learning rate.

    The peak is `learning_rate`, the end `final` times the peak, reached after
    `decay_steps` (the run's steps if 0) and held from there on. Warm-up starts at 0 and
    is part of `decay_steps`.

    `wsd` warms up, stays at the peak, and decays linearly in the last `cooldown` steps.
    More steps delay the decay and change no rate before it, so that a run can be
    extended from a checkpoint that is older than its decay. Source: Hu et al. 2024,
    arXiv:2404.06395; Hägele et al. 2024, arXiv:2405.18392.

    Args:
        options: checked by `optimizer`.
    Raises:
        ValueError: there are too few steps for the warm-up and the cool-down.
    """
    peak, warmup = options.learning_rate, options.warmup
    end, length = peak * options.final, options.decay_steps or steps
    if length < 1:
        raise ValueError(f"steps {steps} must be at least 1")
    if options.schedule == "wsd" and 0 < warmup < 1:
        raise ValueError(
            f"optimizer.warmup {warmup} is a share of the steps, and would change when "
            f"they are extended: optimizer.schedule=wsd needs a number of steps, "
            f"for instance {math.ceil(warmup * length)}"
        )
    warmup, cooldown = (_steps(x, length) for x in (warmup, options.cooldown))
    match options.schedule:
        case "cosine_decay_schedule":
            return optax.cosine_decay_schedule(peak, length, alpha=options.final)
        case "linear_schedule":
            return optax.linear_schedule(peak, end, length)
        case "warmup_constant_schedule" if warmup:
            return optax.warmup_constant_schedule(0.0, peak, warmup)
        case "warmup_cosine_decay_schedule":
            if warmup >= length:
                raise ValueError(
                    f"optimizer.warmup {warmup} must be less than the {length} steps "
                    "after which optimizer.schedule has reached its end"
                )
            return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, length, end)
        case "wsd":
            return _warmup_stable_decay(peak, end, warmup, length, cooldown)
        case _:  # constant, also after no steps of warm-up, where optax would stay at 0
            return optax.constant_schedule(peak)


def _warmup_stable_decay(
    peak: float, end: float, warmup: int, length: int, cooldown: int
) -> optax.Schedule:
    if warmup + cooldown > length:
        raise ValueError(
            f"optimizer.warmup {warmup} and optimizer.cooldown {cooldown} must not "
            f"be more than the {length} steps of optimizer.schedule=wsd"
        )
    parts = [
        optax.linear_schedule(0.0, peak, warmup),
        optax.constant_schedule(peak),
        optax.linear_schedule(peak, end, cooldown),
    ]
    return optax.join_schedules(parts, [warmup, length - cooldown])


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
    """The state of `averaged`."""

    average: Any


def averaged(decay: float) -> optax.GradientTransformation:
    """Changes no update, and keeps an exponential moving average of the weights.

    Averages a_t = decay · a_{t−1} + (1 − decay) · w_t start from the first weights.
    Source: Polyak & Juditsky 1992; exponential, for instance in arXiv:2006.11239.
    """

    def init(params: Any) -> Averaged:
        return Averaged(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Averaged]:
        weights = optax.apply_updates(params, updates)
        average = optax.incremental_update(weights, state.average, 1 - decay)
        return updates, Averaged(average)

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


def _labels(params: Any, rest: str, groups: Container[Hashable]) -> Any:
    """The group of each weight: of muon the kernels of blocks that are matrices, with
    more than one row and column; of embeddings tokens, positions and patches of images,
    and the output layer."""

    def label(path: Any, leaf: Any) -> str:
        parts = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if "embeddings" in groups and parts[0] in EMBEDDINGS:
            return "embeddings"
        inside = parts[0] == "blocks" and parts[-1] == "kernel"
        matrix = inside and len(leaf.shape) == 2 and min(leaf.shape) > 1
        return "muon" if "muon" in groups and matrix else rest

    return jax.tree_util.tree_map_with_path(label, params)
