"""Keys of a run: its steps, and the groups of keys that it has."""

from __future__ import annotations

from dataclasses import dataclass

from symjax.config.data import Data
from symjax.config.keys import Keys, key
from symjax.config.model import Model
from symjax.config.optimizer import Optimizer


@dataclass(frozen=True, repr=False)
class Mesh(Keys):
    """Keys of the device mesh: the number of devices on each axis."""

    data: int = key(-1, "devices that split the batch; -1: all that are left")
    fsdp: int = key(1, "devices that split batch, weights and optimizer state")
    tensor: int = key(1, "devices that split heads and hidden features")
    sequence: int = key(1, "devices that split the tokens of a row")


@dataclass(frozen=True, repr=False)
class Evaluate(Keys):
    """Keys of the held-out evaluations during training."""

    every: int = key(
        500,
        "steps between held-out evaluations (with a sample if evaluate.sample is on); "
        "0: only at the end",
        least=0,
    )
    batches: int = key(20, "held-out batches per evaluation; 0: all", least=0)
    sample: bool = key(
        True, "write a sample at each evaluation, if the model can continue text"
    )


@dataclass(frozen=True, repr=False)
class Checkpoint(Keys):
    """Keys of the checkpoints."""

    every: int = key(
        500,
        "steps between checkpoints; 0: only the last step, which is always saved",
        least=0,
    )
    keep: int = key(2, "number of checkpoints to keep", least=1)
    best: bool = key(
        False, "also keep the checkpoint of the lowest held-out loss: eval.py --best"
    )


@dataclass(frozen=True, repr=False)
class Log(Keys):
    """Keys of metrics, boards and profiles."""

    every: int = key(20, "steps between lines of metrics.jsonl", least=1)
    attention: bool = key(
        True,
        "at every evaluation also write, by layer, the entropy of attention maps, the "
        "largest logit and the norm of the gradient",
    )
    tensorboard: bool = key(False, "also write TensorBoard event files")
    wandb: str = key("", "also log to this project of Weights & Biases; empty: do not")
    name: str = key("", "name of the run in log.wandb; empty: that of its workdir")
    profile: str = key(
        "",
        "first and last step of a trace for XProf or TensorBoard (10:15), written to "
        "profile/ in the workdir",
    )


@dataclass(frozen=True, repr=False)
class Transfer(Keys):
    """Keys of attention transfer: the first steps of a run with init_from."""

    match: str = key(
        "none",
        "train only the weights that init_from lacks (feature maps, gates), so that "
        "each layer matches the layer of init_from on the same input. maps: minimise "
        "the cross-entropy of attention maps; outputs: minimise the squared error of "
        "the layer's outputs",
        ("none", "maps", "outputs"),
    )
    steps: int = key(
        0,
        "steps of the transfer, the first of the run; the schedule of the optimizer "
        "begins after them",
        least=0,
    )
    learning_rate: float = key(
        1e-2, "learning rate of these steps, which is constant", least=0
    )


@dataclass(frozen=True, repr=False)
class Config(Keys):
    """All keys of a run."""

    steps: int = key(3000, "optimizer steps of the run", least=1)
    batch_size: int = key(32, "rows per step, over all devices", least=1)
    seed: int = key(0, "seed of weights, shuffling and dropout", least=0)
    init_from: str = key(
        "",
        "workdir, folder of save_pretrained, or folder with a Llama, DiffLlama or "
        "GPT-2, whose weights are converted to this model before the first step",
    )
    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    mesh: Mesh = Mesh()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    transfer: Transfer = Transfer()
