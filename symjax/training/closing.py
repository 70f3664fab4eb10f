"""What a complete run says of itself: its best loss, its goodput, where things are."""

from etils import epath

from symjax.places import home
from symjax.tables import aligned
from symjax.training import curve
from symjax.training.metrics import rows_of
from symjax.training.profile import FOLDER
from symjax.training.progress import duration


def closing(
    workdir: epath.Path, steps: list[int], unit: str, goodput: tuple[float, float]
) -> list[str]:
    """A table, one line an entry.

    Args:
        steps: of the checkpoints.
        unit: of the held-out loss.
        goodput: the share of the time that steps took, and the seconds in all.
    """
    name = "heldout/loss"
    found = [x for x in rows_of(workdir) if isinstance(x.get(name), float)]
    rows = []
    if best := min(found, key=lambda x: x[name], default=None):
        loss = f"{best[name]:.4f} nats/{unit} at step {best['step']}"
        rows.append(("best held-out loss", loss))
    share, seconds = goodput
    rows.append(("goodput", f"{share:.0%} of {duration(seconds)} were steps"))
    shown = ", ".join(map(str, steps))
    rows.append(("checkpoints", f"{workdir / 'checkpoints'}: {shown}"))
    rows.append(("metrics", str(workdir / "metrics.jsonl")))
    if (home(workdir) / curve.NAME).exists():
        rows.append(("loss curve", str(workdir / curve.NAME)))
    if (home(workdir) / FOLDER).exists():
        rows.append(("trace", str(workdir / FOLDER)))
    return aligned(rows)
