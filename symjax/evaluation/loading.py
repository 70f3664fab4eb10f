"""Loading of a run from its workdir: a checkpoint, its configuration, its examples."""

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
from symjax.data.sources.table import TEXT_SOURCES
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
from symjax.training.step import Program, build_program


class LoadedRun(NamedTuple):
    """A checkpoint on one device, and the examples of its run.

    Attributes:
        examples: the examples of the run, or a text that replaces the held-out text.
        data: the fingerprint of the run's data, as the checkpoint stores it. It differs
            from `examples.fingerprint` if a text replaces the held-out text.
        ema: whether the weights are the average that optimizer.ema keeps.
        changed: one line for each key that --allow changed, with the step.
        sessions: step, date and versions of the first start of the run, and of each
            later start with other versions.
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
        """Return a line without the arrays."""
        what = f"{self.parameters():,} parameters, {attention_of(self.config.model)}"
        mean = ", the mean of weights (ema)" * self.ema
        return f"{type(self).__name__}({self.workdir}, step {self.step}: {what}{mean})"

    def model(self) -> Model:
        return nnx.merge(self.program.graph, self.params, self.constants)

    def decoder(self) -> Decoder:
        """Return the model. Raises: ValueError: it is an encoder."""
        return decoder_of(self.model())

    def parameters(self) -> int:
        """Return the number of trained parameters."""
        return sum(x.size for x in jax.tree.leaves(self.params))


def load(
    workdir: str | os.PathLike[str],
    step: int | None = None,
    *,
    best: bool = False,
    ema: bool = False,
    text: str | None = None,
) -> LoadedRun:
    """Load a checkpoint of a workdir: the newest undamaged one by default.

    The workdir is read and not written. The examples come from its folder `data`. A
    decoder of text can be loaded without this folder, since its checkpoint contains the
    tokenizer, but then has no held-out text.

    Args:
        step: load the checkpoint of this step.
        best: load the kept checkpoint with the least held-out loss.
        ema: load the average of the weights that optimizer.ema kept.
        text: a text that replaces the held-out text.
    Raises:
        ValueError: there is no such run or checkpoint; the checkpoint is damaged or has
            no averaged weights; the folder `data` is missing, except for a decoder of
            text; or there is a `text`, and the model is no decoder of text.
    """
    use_compile_cache()
    workdir = resolve(workdir)
    with store_errors(workdir):
        exists = workdir.is_dir()
    if not exists:
        raise ValueError(f"no workdir {str(workdir)!r}: train.py makes one")
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        meta = checkpoints.read_meta(step, best=best)
        options = saved_options(meta, workdir)
        if ema:
            check_average(options, workdir)
        examples = _examples(options, workdir, meta, text)
        options = with_vocabulary(options, examples)
        program = build_program(options, make_mesh(Mesh(data=1)))
        like = program.state, program.constants
        trees, meta = restored(checkpoints, *like, ema, step, best=best)
    origin = {"workdir": workdir, "data": meta.get("data") or {}, "ema": ema}
    origin |= {name: tuple(meta.get(name, ())) for name in ("changed", "sessions")}
    return LoadedRun(meta["step"], options, examples, program, **trees, **origin)


def _examples(
    options: Config, workdir: epath.Path, meta: dict[str, Any], text: str | None
) -> Examples:
    """Open the examples in the folder `data`, or encode `text` by the run's tokenizer.

    For a decoder of text the folder may be missing. If `text` is None too, there is no
    held-out text, but the model can continue a prompt.
    """
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
    writes_text = is_causal(options.model) and options.data.source in TEXT_SOURCES
    if not described or not writes_text:
        raise ValueError(
            f"{folder} has no {MANIFEST}: eval.py needs the text that train.py put "
            "there"
        )
    return given_examples(language_of(meta), text)


def history(run: LoadedRun, warn: Callable[[str], None]) -> Iterator[LoadedRun]:
    """Load the run at every kept checkpoint, the oldest first.

    Args:
        warn: called with one line for each damaged checkpoint, which is skipped.
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
