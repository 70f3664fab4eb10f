"""Learning rate of each step, and a message if a resumed run changes it."""

import math

import numpy as np
import optax

from symjax import config


def schedule(options: config.Optimizer, steps: int) -> optax.Schedule:
    """Return the function from the number of steps taken to the rate of the next step.

    In a warm-up of w steps, step n has n/w of the peak, `learning_rate`. The constant
    schedules then stay at the peak. The cosine and linear schedules fall from step w
    (from step 1 without a warm-up) to the end value, `final` times the peak. They reach
    it in step `decay_steps`, or in the last step of the run if `decay_steps` is 0, and
    stay there.

    `wsd` warms up, stays at the peak, and decays linearly in the last `cooldown` steps.
    If `cooldown` is 0, the rate jumps to its end value after `decay_steps`. Without
    `decay_steps`, a larger `steps` delays the decay and changes no rate before it. So a
    run can be extended from a checkpoint that is older than its decay. Source: Hu et
    al. 2024, arXiv:2404.06395; Hägele et al. 2024, arXiv:2405.18392.

    Runs of `version` 1 count steps from 0: in a warm-up the first step has the rate 0,
    and a decay reaches its end value one step later than in `version` 2. `wsd` without
    `cooldown` stays at the peak in such runs.

    Args:
        options: keys of the optimizer, which `symjax.training.optimizer` has checked.
        steps: number of steps of the run, without those of attention transfer.
    Raises:
        ValueError: `steps` is below 1, the steps are too few for the warm-up and the
            cool-down, or the warm-up of `wsd` is a share of the steps.
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
    warms_up = name.startswith("warmup_") or name == "wsd"
    warmup = _count(options.warmup, length) if warms_up else 0
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
    """Return the schedule that begins at the peak, in the last step of the warm-up."""
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
    """Return the schedule of `wsd` after its warm-up."""
    peak, cooldown = options.learning_rate, _count(options.cooldown, length)
    if _count(options.warmup, length) + cooldown > length:
        raise ValueError(
            f"optimizer.warmup {warmup} and optimizer.cooldown {cooldown} must not "
            f"be more than the {length} steps of optimizer.schedule=wsd"
        )
    end = peak * options.final
    falling, start = optax.linear_schedule(peak, end, cooldown), length - cooldown
    if not cooldown:
        falling, start = optax.constant_schedule(end), length + 1
        if options.version == 1:  # such runs stay at the peak
            return optax.constant_schedule(peak)
    stable = optax.constant_schedule(peak)
    return optax.join_schedules([stable, falling], [start - warmup])


def schedule_change(
    saved: config.Config, options: config.Config, taken: int
) -> str | None:
    """Return a line if a resumed run has other learning rates than were planned.

    The rates are compared in the remaining steps that both configurations have. The
    line names the step where the rates differ most. The result is None if they agree.
    If a `wsd` run is made longer, its later decay is not reported, unless the decay of
    the shorter run has begun.

    Args:
        saved: configuration in the checkpoint.
        options: configuration of the resumed run.
        taken: number of steps that the optimizer has taken.
    """
    last, hint = min(map(config.scheduled_steps, (saved, options))), ""
    before, now = saved.optimizer.schedule, options.optimizer.schedule
    if before == now == "wsd" and options.steps > saved.steps:
        last -= _count(saved.optimizer.cooldown, last)
        if taken == last:  # the decay would begin in the next step
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
        np.broadcast_to(
            schedule(each.optimizer, config.scheduled_steps(each))(ahead), ahead.shape
        )
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


def _count(steps: float, length: int) -> int:
    """Return a number of steps; a value below 1 is a share of `length`."""
    return round(steps * length if steps < 1 else steps)
