"""Dashboards that show the metrics of a run: TensorBoard and Weights & Biases.

Both have the methods `add_scalar(name, number, step)` and `close()`.
"""

import secrets
from typing import Any

from etils import epath

from symjax.config import Log
from symjax.optional import needed
from symjax.storage import local_folder


def boards(
    log: Log, workdir: epath.Path, step: int, config: dict[str, Any]
) -> list[Any]:
    """Return the dashboards of a configuration, for a run that continues after `step`.

    Raises:
        ValueError: a package is not installed, or Weights & Biases cannot be reached.
    """
    found = []
    if log.tensorboard:
        line = "log.tensorboard needs tensorboardX: pip install tensorboardX"
        writer = needed("tensorboardX", line).SummaryWriter
        folder = str(local_folder(workdir) / "tensorboard")
        # With purge_step TensorBoard hides values of later steps in earlier files.
        found.append(writer(folder, purge_step=step + 1, flush_secs=10))
    if log.wandb:
        found.append(WeightsAndBiases(log, workdir, config))
    return found


class WeightsAndBiases:
    """A run in the project log.wandb; a workdir that resumes continues the same run.

    Values that a killed run logged after its last checkpoint stay in wandb, which
    accepts no earlier steps. With WANDB_MODE=offline wandb writes only to wandb/ in the
    run's local folder.
    """

    def __init__(self, log: Log, workdir: epath.Path, config: dict[str, Any]):
        wandb = needed("wandb", "log.wandb needs wandb: pip install wandb")
        path = workdir / "wandb" / "id"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(secrets.token_hex(8))
        try:
            self._run = wandb.init(
                project=log.wandb,
                name=log.name or workdir.name,
                id=path.read_text(),
                resume="allow",
                dir=local_folder(workdir),
                config=config,
                settings=wandb.Settings(silent=True),
            )
        except wandb.Error as error:
            raise ValueError(f"log.wandb {log.wandb!r}: {error}") from error

    def add_scalar(self, name: str, number: float, step: int) -> None:
        self._run.log({name: number}, step=step)

    def close(self) -> None:
        self._run.finish()
