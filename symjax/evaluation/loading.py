"""A run as its workdir holds it: a checkpoint, its configuration and its examples."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from symjax.config import Config, Mesh
from symjax.data.examples import Examples, open_examples
from symjax.data.folder import MANIFEST
from symjax.models.build import Model
from symjax.models.decoder import Decoder
from symjax.training.checkpoint import Checkpoints
from symjax.training.preflight import (
    check_data,
    saved_options,
    use_compile_cache,
    with_vocabulary,
)
from symjax.training.sharding import make_mesh
from symjax.training.step import Program, compile_program


class LoadedRun(NamedTuple):
    """A checkpoint and what it was trained on, on one device."""

    step: int
    config: Config
    examples: Examples
    program: Program
    params: dict[str, Any]
    constants: dict[str, Any]
    workdir: Path

    def model(self) -> Model:
        return nnx.merge(self.program.graph, self.params, self.constants)

    def decoder(self) -> Decoder:
        """Raises: ValueError: the model is an encoder."""
        model = self.model()
        if not isinstance(model, Decoder):
            raise ValueError("the model is an encoder: it predicts no next token")
        return model

    def parameters(self) -> int:
        """How many there are."""
        return sum(x.size for x in jax.tree.leaves(self.params))


def load(workdir: Path, step: int | None = None, *, best: bool = False) -> LoadedRun:
    """The newest whole checkpoint of a workdir, the one of `step`, or the best one.

    Reads the workdir only, and writes nothing in it.

    Raises:
        ValueError: there is no such run or checkpoint, or it is damaged.
    """
    use_compile_cache()
    workdir = workdir.absolute()
    if not workdir.is_dir():
        raise ValueError(f"no workdir {str(workdir)!r}: train.py makes one")
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        meta = checkpoints.read_meta(step, best=best)
        options = saved_options(meta, workdir)
        if not (workdir / "data" / MANIFEST).is_file():
            raise ValueError(
                f"{workdir / 'data'} has no {MANIFEST}: eval.py needs the text that "
                "train.py put there"
            )
        examples = open_examples(options, workdir / "data")
        check_data(meta, examples, workdir)
        options = with_vocabulary(options, examples)
        program = compile_program(options, make_mesh(Mesh(data=1)))
        trees, meta = checkpoints.restore(_wanted(program), step, best=best)
    return LoadedRun(meta["step"], options, examples, program, workdir=workdir, **trees)


def history(run: LoadedRun, warn: Callable[[str], None]) -> Iterator[LoadedRun]:
    """The run at every checkpoint kept, from the oldest on.

    Args:
        warn: called with one line for each checkpoint that is damaged.
    """
    with Checkpoints(run.workdir / "checkpoints") as checkpoints:
        for step in checkpoints.steps():
            try:
                trees, _ = checkpoints.restore(_wanted(run.program), step)
            except ValueError as error:
                warn(str(error))
            else:
                yield run._replace(step=step, **trees)


def _wanted(program: Program) -> dict[str, Any]:
    return {"params": program.state.params, "constants": program.constants}
