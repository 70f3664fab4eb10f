"""First part of the HTML page: the run, its configuration, data and loss curve."""

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
    """Return results by heading; a loss curve only if the workdir has logged losses."""
    parts = {"run": _run(run), "configuration": _configuration(run.config)}
    parts |= {"data": _data(run)}
    if (figure := loss_curve(rows_of(run.workdir), run.examples.unit)) is not None:
        parts["loss curve"] = Result({}, [], (), (figure,))
    return parts


def _run(run: LoadedRun) -> Result:
    """Return the seed, dates and versions, and the keys that --allow has changed."""
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
    """Return the steps, the keys that differ from their defaults, and all options that
    the mechanisms of the model declare."""
    groups = chosen, Config(steps=chosen.steps)
    rows = [("steps", _value_text(chosen.steps), "")]
    for name, _, _ in validation.fields():
        value, default = map(attrgetter(name), groups)
        if value != default:
            rows.append((name, _value_text(value), _value_text(default)))
    for name, option in declared_options(chosen.model).items():
        value = chosen.model.attention.options.get(name, option.default)
        key = f"model.attention.options.{name}"
        rows.append((key, _value_text(value), _value_text(option.default)))
    columns = ("key", "value", "default")
    text = ["steps, keys that differ from their defaults, options of mechanisms"]
    return Result({}, text, (Table("configuration", columns, rows),))


def _data(run: LoadedRun) -> Result:
    """Return the sizes and hash of the run's data, and those of a text of --text.

    With --text, or without the folder `data`, the sizes of the run's data are those
    that the checkpoint stores.
    """
    examples, length = run.examples, run.config.model.length
    rows = [("source", run.config.data.source)]
    if has_text := is_given(examples):
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
        ("sha256", _short_hash(run.data)),
    ]
    if has_text and examples.text and len(text := examples.text.heldout):
        sha256 = _short_hash(examples.fingerprint)
        rows.append(("--text", f"{len(text):,} tokens, sha256 {sha256}"))
    return Result({}, [], (Table("data", ("data", ""), rows),))


def _short_hash(fingerprint: dict[str, Any]) -> str:
    return str(fingerprint.get("sha256", "-"))[:16]


def _value_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    return "-" if value in ("", None) else str(value)
