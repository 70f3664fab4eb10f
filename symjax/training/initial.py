"""What a run begins with: a checkpoint, the weights of another run, or new ones."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from symjax import config
from symjax.attention.projections import KINDS
from symjax.data.examples import Examples, open_examples
from symjax.data.folder import MANIFEST
from symjax.models import build, convert
from symjax.models.convert import carried
from symjax.training import processes
from symjax.training.checkpoint import Checkpoints
from symjax.training.preflight import saved_options, with_vocabulary
from symjax.training.step import Program, State, parts


class Start(NamedTuple):
    """What the first step takes; of a resumed run also the configuration until then."""

    state: State
    constants: dict[str, Any]
    saved: config.Config | None = None


def initial_state(
    options: config.Config,
    program: Program,
    examples: Examples,
    checkpoints: Checkpoints,
) -> Start:
    """The newest whole checkpoint; else weights of `init_from`, or from the seed.

    Raises:
        ValueError: the checkpoints or the weights of the other run do not fit.
    """
    if not checkpoints.steps():
        return _new(options, program, examples)
    like = program.state
    wanted = {"params": like.params, "optimizer": like.optimizer}
    trees, meta = checkpoints.restore({**wanted, "constants": program.constants})
    step = jax.device_put(jnp.int32(meta["step"]), like.step.sharding)
    saved = saved_options(meta, checkpoints.directory.parent)
    state = State(step, trees["params"], trees["optimizer"])
    return Start(state, trees["constants"], saved)


def _new(options: config.Config, program: Program, examples: Examples) -> Start:
    with jax.set_mesh(program.mesh):
        state, constants = program.initial(options.seed)
    model, unfitted = program.model, options.model.attention.features in KINDS
    if options.init_from:
        origin = weights_of(Path(options.init_from), model, examples)
        state = state._replace(params=_placed(origin.params, state.params))
        found, unfitted = carried(constants, origin.constants, origin.source, model)
        constants = _placed(found, constants)
    if unfitted:
        shape = (options.batch_size, options.model.length)
        rows = examples.batch(shape, seed=options.seed, step=0)
        with jax.set_mesh(program.mesh):
            inputs, _ = program.place(shape, rows)
            constants = program.calibrate(state.params, constants, inputs)
    return Start(state, constants)


class Origin(NamedTuple):
    """Weights of another run, converted to this model, and the constants and the model
    that they come with."""

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
            params, constants = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(
                    x.shape, x.dtype, sharding=processes.replicated()
                ),
                parts(nnx.eval_shape(lambda: build(source, rngs=nnx.Rngs(0)))),
            )
            trees, _ = checkpoints.restore({"params": params, "constants": constants})
        params = convert(trees["params"], source, target)
        return Origin(params, trees["constants"], source)
    except ValueError as error:
        raise ValueError(f"init_from: {error}") from None


def _placed(values: Any, like: Any) -> Any:
    """Arrays where those of another tree of the same kind are.

    Copies: a conversion may give two weights one array, and a step donates each.
    """
    places = jax.tree.map(lambda x: x.sharding, like)
    return jax.device_put(values, places, may_alias=False)
