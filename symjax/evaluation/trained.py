"""A trained model as its workdir holds it; nothing else is read."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from symjax import config
from symjax.data.corpus import MANIFEST
from symjax.data.examples import Examples, open_examples
from symjax.models.build import Model
from symjax.models.decoder import Decoder
from symjax.training.checkpoint import Checkpoints
from symjax.training.sharding import make_mesh
from symjax.training.starting import (
    check_data,
    saved_options,
    use_compile_cache,
    with_vocabulary,
)
from symjax.training.step import Program, compile_program


class Trained(NamedTuple):
    """A checkpoint and what it was trained on, on one device."""

    step: int
    options: config.Config
    corpus: Examples
    program: Program
    params: dict[str, Any]
    constants: dict[str, Any]
    workdir: Path

    def model(self) -> Decoder:
        """Raises: ValueError: it is an encoder, see `any_model`."""
        model = self.any_model()
        if not isinstance(model, Decoder):
            raise ValueError("the model is an encoder: it says no next token")
        return model

    def any_model(self) -> Model:
        return nnx.merge(self.program.graph, self.params, self.constants)


def load(workdir: Path, step: int | None = None, *, best: bool = False) -> Trained:
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
        corpus = open_examples(options, workdir / "data")
        check_data(meta, corpus, workdir)
        options = with_vocabulary(options, corpus)
        mesh = make_mesh(config.Mesh(data=1))
        program = compile_program(options, mesh)
        trees, meta = checkpoints.restore(_wanted(program), step, best=best)
    return Trained(meta["step"], options, corpus, program, workdir=workdir, **trees)


def history(trained: Trained, warn: Callable[[str], None]) -> Iterator[Trained]:
    """The run at every checkpoint kept, from the oldest on.

    Args:
        warn: called with one line for each checkpoint that is damaged.
    """
    with Checkpoints(trained.workdir / "checkpoints") as checkpoints:
        for step in checkpoints.steps():
            try:
                trees, _ = checkpoints.restore(_wanted(trained.program), step)
            except ValueError as error:
                warn(str(error))
            else:
                yield trained._replace(step=step, **trees)


def _wanted(program: Program) -> dict[str, Any]:
    return {"params": program.state.params, "constants": program.constants}
