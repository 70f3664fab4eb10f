"""Weights to start from: those of another run, converted to this model."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from symjax import config
from symjax.data.examples import Examples, open_examples
from symjax.data.folder import MANIFEST
from symjax.layers import Constant
from symjax.models import build, convert
from symjax.training import processes
from symjax.training.checkpoint import Checkpoints
from symjax.training.starting import saved_options, with_vocabulary


class Origin(NamedTuple):
    """What a run starts from: weights converted to its model, and the constants and
    the model of the run that they come from."""

    params: dict[str, Any]
    constants: dict[str, Any]
    source: config.Model


def weights_of(workdir: Path, target: config.Model, corpus: Examples) -> Origin:
    """The newest weights in `workdir`, as those of a `target` model for `corpus`.

    Raises:
        ValueError: there is no checkpoint, its tokens are not those of the corpus, or
            its weights do not fit the model; the message names `init_from`.
    """
    try:
        if not (workdir / "data" / MANIFEST).is_file():
            raise ValueError(f"{workdir} is no workdir of train.py")
        with Checkpoints(workdir.absolute() / "checkpoints") as checkpoints:
            options = saved_options(checkpoints.read_meta(), workdir)
            other = open_examples(options, workdir / "data")
            if other.language != corpus.language:
                raise ValueError(
                    f"{workdir} was trained on other tokens: data.source "
                    f"{options.data.source!r}, data.tokenizer "
                    f"{options.data.tokenizer!r}, model.kind {options.model.kind!r}"
                )
            source = with_vocabulary(options, other).model
            model = nnx.eval_shape(lambda: build(source, rngs=nnx.Rngs(0)))
            wanted = {
                "params": nnx.to_pure_dict(nnx.state(model, nnx.Param)),
                "constants": nnx.to_pure_dict(nnx.state(model, Constant)),
            }
            wanted = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(
                    x.shape, x.dtype, sharding=processes.everywhere()
                ),
                wanted,
            )
            trees, _ = checkpoints.restore(wanted)
        params = convert(trees["params"], source, target)
        return Origin(params, trees["constants"], source)
    except ValueError as error:
        raise ValueError(f"init_from: {error}") from None
