"""The top of a report: the run, its configuration, data and loss curve."""

from operator import attrgetter
from typing import Any

from symjax import validation
from symjax.config import Config, declared_options
from symjax.data.given import is_given
from symjax.evaluation.loading import LoadedRun
from symjax.evaluation.results import Result, Table
from symjax.monitor.curve import loss_curve
from symjax.monitor.metrics import rows_of


def overview(run: LoadedRun) -> dict[str, Result]:
    """By heading; the loss curve only where its numbers are still in the workdir."""
    found = {"run": _run(run), "configuration": _configuration(run.config)}
    found |= {"data": _data(run)}
    if (figure := loss_curve(rows_of(run.workdir), run.examples.unit)) is not None:
        found["loss curve"] = Result({}, [], (), (figure,))
    return found


def _run(run: LoadedRun) -> Result:
    """Seed, dates and versions, and what --allow has changed."""
    rows: list[tuple[str, ...]] = [("seed", str(run.config.seed))]
    for session in run.sessions:
        names = ("symjax", "jax", "flax", "python")
        versions = ", ".join(f"{x} {session[x]}" for x in names if x in session)
        start = f"from step {session.get('step', '-')}"
        rows.append((start, f"{session.get('date', '-')} UTC, {versions}"))
    if not run.sessions:
        rows.append(("date, versions", "not in checkpoints of older versions"))
    for line in run.changed:
        start, _, change = line.partition(": ")
        rows.append((f"changed {start}", change))
    return Result({}, [], (Table("run", ("run", ""), rows),))


def _configuration(chosen: Config) -> Result:
    groups = chosen, Config(steps=chosen.steps)
    rows = [("steps", _word(chosen.steps), "")]
    for name, _, _ in validation.fields():
        value, default = map(attrgetter(name), groups)
        if value != default:
            rows.append((name, _word(value), _word(default)))
    for name, option in declared_options(chosen.model).items():
        value = chosen.model.attention.options.get(name, option.default)
        key = f"model.attention.options.{name}"
        rows.append((key, _word(value), _word(option.default)))
    columns = ("key", "value", "default")
    text = ["keys that differ from their defaults"]
    return Result({}, text, (Table("configuration", columns, rows),))


def _data(run: LoadedRun) -> Result:
    """The data of the run, as its checkpoint has them where a text was given."""
    examples, length = run.examples, run.config.model.length
    rows = [("source", run.config.data.source)]
    if given := is_given(examples):
        for name, split in (("training", "train"), ("held out", "heldout")):
            if counts := run.data.get(split):
                rows.append((name, f"{counts['tokens']:,} tokens"))
    else:
        rows.append(("training", examples.size))
        if examples.heldout_rows is not None:
            count = examples.heldout_rows(length)
            rows.append(("held out", f"{count:,} rows of {length:,} tokens"))
    rows += [
        ("token", examples.unit),
        ("vocabulary", str(run.config.model.vocabulary)),
        ("sha256", _short(run.data)),
    ]
    if given and examples.text and len(text := examples.text.heldout):
        rows.append(
            ("--text", f"{len(text):,} tokens, sha256 {_short(examples.fingerprint)}")
        )
    return Result({}, [], (Table("data", ("data", ""), rows),))


def _short(fingerprint: dict[str, Any]) -> str:
    return str(fingerprint.get("sha256", "-"))[:16]


def _word(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    return "-" if value in ("", None) else str(value)
