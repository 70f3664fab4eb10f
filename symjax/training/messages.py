"""Lines that a run prints before its first step and after its last one."""

import dataclasses

import jax

from symjax import config, imports
from symjax.data.sources.mixture import rounding_notes
from symjax.data.store.folder import source_change
from symjax.monitor.curve import NAME as CURVE
from symjax.monitor.metrics import rows_of
from symjax.monitor.profile import FOLDER as TRACES
from symjax.monitor.profile import Profile
from symjax.monitor.progress import duration
from symjax.storage import in_bucket, local_folder
from symjax.tables import aligned
from symjax.training.context import RunContext
from symjax.training.schedule import schedule_change
from symjax.training.step import State


def introduce(
    context: RunContext, state: State, saved: config.Config | None, profile: Profile
) -> None:
    """Print what is trained, on which data and devices, and what a resumed run changes.

    Args:
        saved: configuration in the checkpoint of a resumed run.
    """
    options, line = context.options, context.progress.line
    weights = sum(x.size for x in jax.tree.leaves(state.params))
    origin = "new run"
    if first := int(state.step):
        origin = f"resumed at step {first}"
    elif options.init_from:
        origin = f"weights of {options.init_from}"
    count = jax.process_count()
    processes = f" of {count} processes" if count > 1 else ""
    line(
        f"{weights:,} parameters, {context.examples.size}, "
        f"{context.program.mesh.size} {jax.devices()[0].platform} device(s)"
        f"{processes}: {origin} in {context.workdir}"
    )
    local = local_folder(context.workdir)
    if in_bucket(context.workdir):
        line(
            f"a bucket has no locks: start no second run in {context.workdir}; metrics "
            f"are copied there at each save from {local}"
        )
    if first < options.transfer.steps:
        line(
            f"steps {first + 1} to {options.transfer.steps} are attention transfer: "
            f"only weights that {options.init_from} lacks train, and the loss is the "
            f"error of {options.transfer.match}"
        )
    for change in context.history.changed:
        line(f"changed {change}")
    if unknown := imports.unaccounted(dataclasses.asdict(options.model)):
        line(
            f"not stored: the code of {', '.join(unknown)}, which --import did not "
            "add; whoever reads this run has to add it"
        )
    if saved and saved.steps != options.steps:
        if change := schedule_change(saved, options, int(state.optimizer.taken)):
            line(change)
    if 0 < profile.last <= first:
        line(f"no trace: log.profile {options.log.profile} is over")
    if options.optimizer.version < config.Optimizer().version:
        line(
            f"optimizer.version {options.optimizer.version}: the run continues by "
            "the rules of the optimizer that it began with (docs/checkpoints.md)"
        )
    for change in rounding_notes(options.data):
        line(change)
    if change := source_change(options.data, local / "data"):
        line(change)


def summary(context: RunContext) -> list[str]:
    """Return the last lines of a complete run: best loss, goodput, and its files.

    Goodput is the share of the time of this process in which steps ran.
    """
    workdir, name, lines = context.workdir, "heldout/loss", []
    evaluated = [x for x in rows_of(workdir) if isinstance(x.get(name), float)]
    if best := min(evaluated, key=lambda x: x[name], default=None):
        loss = f"{best[name]:.4f} nats/{context.examples.unit} at step {best['step']}"
        if count := best.get("heldout/batches"):
            loss += f", on {count:.0f} batches"
        lines.append(("best held-out loss", loss))
    share, seconds = context.clock.goodput()
    lines.append(("goodput", f"{share:.0%} of {duration(seconds)} were steps"))
    steps = ", ".join(map(str, context.checkpoints.steps()))
    lines.append(("checkpoints", f"{workdir / 'checkpoints'}: {steps}"))
    lines.append(("metrics", str(workdir / "metrics.jsonl")))
    if (local_folder(workdir) / CURVE).exists():
        lines.append(("loss curve", str(workdir / CURVE)))
    if (local_folder(workdir) / TRACES).exists():
        lines.append(("trace", str(workdir / TRACES)))
    return aligned(lines)
