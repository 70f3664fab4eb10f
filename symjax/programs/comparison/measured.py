"""Measurements of one run for `compare`: losses, λ, speed, curve, evaluation tasks."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from etils import epath

from symjax.distributed.exit_codes import print_warning
from symjax.evaluation import report, tasks
from symjax.evaluation.headlines import Headlines, headlines
from symjax.evaluation.loading import LoadedRun, history, load
from symjax.evaluation.measures.language import losses
from symjax.evaluation.results import Options
from symjax.models.lambdas import lambda_table
from symjax.monitor.metrics import rows_of
from symjax.programs.comparison.runs import Workdir
from symjax.programs.comparison.tuned import split
from symjax.storage import check_writable
from symjax.training.step import means


class Evaluated(NamedTuple):
    """Measurements of one run.

    Attributes:
        losses: as `symjax.evaluation.measures.language.losses` returns them.
        lambdas: a record for each layer of differential V1.
        speed: median of the tokens per second in metrics.jsonl; None if it has none.
        curve: pairs (step, held-out loss), on the held-out batches of `losses`.
        tokens: number of tokens of training.
        separate: whether one token of every document is not a target, because documents
            are kept apart.
        batches: number of held-out batches that were evaluated.
        all_batches: number of held-out batches in all.
        unit: "token", "byte", "label", …; losses are in nats per unit.
        from_checkpoints: whether the curve was measured on the kept checkpoints,
            because training evaluated on other batches.
        headlines: headline numbers of the evaluation tasks, by label.
        remarks: a line for each task that does not apply to the run.
    """

    parameters: int
    losses: dict[str, Any]
    lambdas: list[dict[str, float]]
    speed: float | None
    curve: list[tuple[int, float]]
    tokens: int = 0
    separate: bool = False
    batches: int = 0
    all_batches: int = 0
    unit: str = "token"
    from_checkpoints: bool = False
    seed: int = 0
    headlines: Headlines = {}
    remarks: tuple[str, ...] = ()

    def measures(self, loss: str) -> Headlines:
        """Return the numbers that are compared by seed.

        Args:
            loss: label of the held-out loss, the first of them.
        """
        heldout = self.losses["heldout"]
        accuracy = {x: heldout[x] for x in ("accuracy",) if x in heldout}
        return {loss: heldout["loss"], **accuracy, **self.headlines}


def evaluate(
    workdir: Workdir,
    batches: int | None = None,
    names: Sequence[str] = (),
    folder: Workdir | None = None,
    *,
    part: bool = False,
) -> Evaluated:
    """Measure the newest checkpoint of a run.

    Args:
        batches: number of held-out batches; None means all.
        names: evaluation tasks to run.
        folder: tables, figures and JSON of these tasks are written to FOLDER-seedN.
        part: leave out the held-out rows on which --tune chose a value.
    """
    run = load(workdir)
    if part:
        judging = split(run.examples, run.config.model.length).judging
        run = run._replace(examples=judging)
    rows = rows_of(epath.Path(workdir))
    speeds = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    measured = losses(run, batches)
    heldout = measured["heldout"]
    curve = {} if part else curve_of_run(run, rows, heldout["batches"])
    from_checkpoints = not curve
    if from_checkpoints:
        curve = curve_of_checkpoints(run, heldout["batches"])
    found, remarks = {}, ()
    if names and folder is not None:
        place = folder.parent / f"{folder.name}-seed{run.config.seed}"
        found, remarks = measure_tasks(run, names, batches, place)
    return Evaluated(
        run.parameters(),
        measured,
        lambda_table(run.model()),
        statistics.median(speeds) if speeds else None,
        sorted((curve | {run.step: heldout["loss"]}).items()),
        run.step * run.config.batch_size * run.config.model.length,
        _skips_a_token(run),
        heldout["batches"],
        heldout["all_batches"],
        run.examples.unit,
        from_checkpoints,
        run.config.seed,
        found,
        remarks,
    )


def measure_tasks(
    run: LoadedRun, names: Sequence[str], batches: int | None, folder: Workdir
) -> tuple[Headlines, tuple[str, ...]]:
    """Run evaluation tasks, write what they find, and return the headline numbers.

    Args:
        batches: as `eval.py --batches`.
        folder: folder for the tables (CSV), the figures (PNG) and tasks.json.
    Returns:
        The headline numbers by label, and a line for each task that does not apply.
    """
    check_writable(folder, f"--out {folder}")
    results, found, remarks = {}, {}, []
    for name in names:
        result = results[name] = tasks.measure(name, run, Options(batches=batches))
        found |= headlines(name, result)
        if len(result.text) == 1 and not (result.tables or result.figures):
            remarks += result.text
    text = report.to_json(tasks.describe_checkpoint(run), results)
    report.write(text.encode(), folder / "tasks.json", "--out")
    report.write_folder(results, folder)
    return found, tuple(remarks)


def _skips_a_token(run: LoadedRun) -> bool:
    """Return whether one token of every document is not a target."""
    text = run.examples.text
    return run.examples.separate and not (text and text.shared)


def curve_of_run(
    run: LoadedRun, rows: list[dict[str, Any]], batches: int
) -> dict[int, float]:
    """Return step → held-out loss of the run's own evaluations on `batches` batches.

    Args:
        rows: the rows of metrics.jsonl. Rows of older runs lack the number of batches,
            which is then taken from the configuration.
    """
    shape = run.config.batch_size, run.config.model.length
    total = run.examples.heldout_count(shape)
    usual = min(run.config.evaluate.batches or total, total)
    return {
        row["step"]: row["heldout/loss"]
        for row in rows
        if row["step"] <= run.step
        and row.get("heldout/loss") is not None
        and row.get("heldout/batches", usual) == batches
    }


def curve_of_checkpoints(run: LoadedRun, batches: int) -> dict[int, float]:
    """Return step → held-out loss of the earlier checkpoints on `batches` batches."""
    shape = run.config.batch_size, run.config.model.length
    curve = {}
    for earlier in history(run, print_warning):
        if earlier.step < run.step:
            rows = run.examples.heldout_batches(shape, batches)
            arrays = earlier.params, earlier.constants
            curve[earlier.step] = means(run.program, *arrays, shape, rows).loss
    return curve


def check_documents(runs: dict[str, list[Evaluated]]) -> None:
    """Refuse to compare joined and separate documents, which have different targets.

    Raises:
        ValueError: naming a run of each.
    """
    names = {seeds[0].separate: name for name, seeds in runs.items()}
    if len(names) > 1:
        raise ValueError(
            f"{names[False]} joins documents and {names[True]} keeps them apart "
            "(data.documents): their losses are means over different tokens"
        )


def check_batches(runs: dict[str, list[Evaluated]]) -> None:
    """Refuse runs that were evaluated on different parts of the held-out examples.

    Raises:
        ValueError: naming two runs and their numbers of batches.
    """
    names = {
        (run.batches, run.all_batches): name
        for name, seeds in runs.items()
        for run in seeds
    }
    if len(names) > 1 and any(count < total for count, total in names):
        (first, first_name), (second, second_name), *_ = names.items()
        raise ValueError(
            f"{first_name} is evaluated on {first[0]} of {first[1]} held-out batches, "
            f"{second_name} on {second[0]} of {second[1]}, since their batches have "
            "different sizes: leave --batches out"
        )
