"""A run as its workdir holds it: a checkpoint, its configuration and its examples."""

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from etils import epath
from flax import nnx

from symjax.checkpoints.checkpoint import Checkpoints
from symjax.config import Config, Mesh, attention_of, is_causal
from symjax.data.examples import Examples, open_examples
from symjax.data.given import given_examples
from symjax.data.sources.sources import TEXT_SOURCES
from symjax.data.store.manifest import MANIFEST
from symjax.models.build import Model, decoder_of
from symjax.models.decoder import Decoder
from symjax.storage import resolve, store_errors
from symjax.training.compile import use_compile_cache
from symjax.training.preflight import (
    check_data,
    data_folder,
    saved_options,
    with_vocabulary,
)
from symjax.training.saved import check_average, language_of, restored
from symjax.training.sharding import make_mesh
from symjax.training.step import Program, compile_program


class LoadedRun(NamedTuple):
    """A checkpoint and what it was trained on, on one device.

    Attributes:
        data: what the checkpoint says of the data of its run, as `fingerprint` of
            `examples`, in whose place a given text may stand.
        ema: whether the weights are the mean that optimizer.ema keeps.
        changed: one line for each key that --allow has changed, and from which step.
        sessions: the step, date and versions of its first start, and of each start
            with other versions.
    """

    step: int
    config: Config
    examples: Examples
    program: Program
    params: dict[str, Any]
    constants: dict[str, Any]
    workdir: epath.Path
    data: dict[str, Any]
    ema: bool = False
    changed: tuple[str, ...] = ()
    sessions: tuple[dict[str, Any], ...] = ()

    def __repr__(self) -> str:
        """Without its arrays."""
        what = f"{self.parameters():,} parameters, {attention_of(self.config.model)}"
        mean = ", the mean of weights (ema)" * self.ema
        return f"{type(self).__name__}({self.workdir}, step {self.step}: {what}{mean})"

    def model(self) -> Model:
        return nnx.merge(self.program.graph, self.params, self.constants)

    def decoder(self) -> Decoder:
        """Raises: ValueError: the model is an encoder."""
        return decoder_of(self.model())

    def parameters(self) -> int:
        """How many there are."""
        return sum(x.size for x in jax.tree.leaves(self.params))


def load(
    workdir: str | os.PathLike[str],
    step: int | None = None,
    *,
    best: bool = False,
    ema: bool = False,
    text: str | None = None,
) -> LoadedRun:
    """The newest whole checkpoint of a workdir, the one of `step`, or the best one.

    Reads the workdir only, and writes nothing in it. The checkpoint of a decoder has
    its tokenizer, so that its folder `data` is needed for held-out text alone.

    Args:
        ema: take the mean of the weights that the run kept by optimizer.ema.
        text: stands in place of the held-out text.
    Raises:
        ValueError: there is no such run or checkpoint, it is damaged, or it has no
            mean of the weights; a text for a model that has not learned to continue
            one.
    """
    use_compile_cache()
    workdir = resolve(workdir)
    with store_errors(workdir):
        found = workdir.is_dir()
    if not found:
        raise ValueError(f"no workdir {str(workdir)!r}: train.py makes one")
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        meta = checkpoints.read_meta(step, best=best)
        options = saved_options(meta, workdir)
        if ema:
            check_average(options, workdir)
        examples = _examples(options, workdir, meta, text)
        options = with_vocabulary(options, examples)
        program = compile_program(options, make_mesh(Mesh(data=1)))
        like = program.state, program.constants
        trees, meta = restored(checkpoints, *like, ema, step, best=best)
    found = {"workdir": workdir, "data": meta.get("data") or {}, "ema": ema}
    found |= {name: tuple(meta.get(name, ())) for name in ("changed", "sessions")}
    return LoadedRun(meta["step"], options, examples, program, **trees, **found)


def _examples(
    options: Config, workdir: epath.Path, meta: dict[str, Any], text: str | None
) -> Examples:
    """The examples in the folder `data`, or a given text by the run's tokenizer."""
    folder, described = data_folder(workdir), meta.get("examples")
    if (folder / MANIFEST).is_file():
        examples = open_examples(options, folder)
        check_data(meta, examples, workdir)
        if text is None:
            return examples
        if examples.text is None:
            raise ValueError("--text is for decoders that have learned a text")
        return given_examples(
            language_of(meta) if described else examples.language, text
        )
    learned = is_causal(options.model) and options.data.source in TEXT_SOURCES
    if not described or not learned:
        raise ValueError(
            f"{folder} has no {MANIFEST}: eval.py needs the text that train.py put "
            "there"
        )
    return given_examples(language_of(meta), text)


def history(run: LoadedRun, warn: Callable[[str], None]) -> Iterator[LoadedRun]:
    """The run at every checkpoint kept, from the oldest on.

    Args:
        warn: called with one line for each checkpoint that is damaged.
    """
    like = run.program.state, run.program.constants
    with Checkpoints(run.workdir / "checkpoints") as checkpoints:
        for step in checkpoints.steps():
            try:
                trees, _ = restored(checkpoints, *like, run.ema, step)
            except ValueError as error:
                warn(str(error))
            else:
                yield run._replace(step=step, **trees)
