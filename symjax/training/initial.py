"""First state of a run: a checkpoint, the weights of another run, or new ones."""

from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from symjax import config, validation
from symjax.checkpoints.checkpoint import Checkpoints
from symjax.data.examples import Examples, same_tokens
from symjax.distributed.exit_codes import print_warning
from symjax.distributed.launch import is_process_zero
from symjax.layers.validate import sizes
from symjax.models import convert
from symjax.models.convert import FREE, carried, changes
from symjax.models.huggingface.files import from_the_hub
from symjax.models.huggingface.folders import SUFFIXES, Folder, is_folder, read_folder
from symjax.storage import local_copy, resolve, store_errors
from symjax.training.preflight import saved_options
from symjax.training.saved import read_run
from symjax.training.step import Program, State


def initial_state(
    options: config.Config,
    program: Program,
    examples: Examples,
    checkpoints: Checkpoints,
) -> tuple[State, dict[str, Any], config.Config | None]:
    """The newest whole checkpoint; else weights of `init_from`, or from the seed.

    Returns:
        The state, the constants, and of a resumed run the configuration until then.
    Raises:
        ValueError: the checkpoints or the weights of the other run do not fit.
    """
    if not checkpoints.steps():
        return *_new(options, program, examples), None
    like = program.state
    wanted = {"params": like.params, "optimizer": like.optimizer}
    trees, meta = checkpoints.restore({**wanted, "constants": program.constants})
    step = jax.device_put(jnp.int32(meta["step"]), like.step.sharding)
    workdir = checkpoints.directory.parent
    saved = saved_options(meta, workdir, warn=lambda line: None)  # said before
    state = State(step, trees["params"], trees["optimizer"])
    return state, trees["constants"], saved


def _new(
    options: config.Config, program: Program, examples: Examples
) -> tuple[State, dict[str, Any]]:
    with jax.set_mesh(program.mesh):
        state, constants = program.initial(options.seed)
    model = program.model
    if options.init_from:
        origin = weights_of(options.init_from, model, examples)
        changed = changes(origin.options, model)
        if changed and is_process_zero():
            print_warning(
                "init_from: the weights begin as another function, by "
                f"{', '.join(changed)}"
            )
        state = state._replace(params=_placed(origin.params, state.params))
        found = carried(constants, origin.constants, origin.options, model)
        constants = _placed(found, constants)
    return state, constants


def weights_of(origin: str | Path, target: config.Model, corpus: Examples) -> Folder:
    """The weights of a workdir or of a folder, as those of a `target` model for
    `corpus`.

    Raises:
        ValueError: there is no checkpoint, its tokens are not those of the corpus, or
            its weights do not fit the model; the message names `init_from`.
    """
    try:
        where = resolve(origin)
        with store_errors(where):
            folder, run = is_folder(where), (where / "checkpoints").is_dir()
        if not folder and not run:
            raise ValueError(
                f"{origin} is no workdir of train.py and no model's folder"
                f"{from_the_hub(origin)}"
            )
        if folder:
            found = _of_folder(where, target, corpus)
        else:
            found = _of_run(where, corpus)
        return found._replace(params=convert(found.params, found.options, target))
    except ValueError as error:
        raise ValueError(f"init_from: {error}") from None


def _of_run(workdir: epath.Path, corpus: Examples) -> Folder:
    """The newest weights of a workdir."""
    found = read_run(workdir)
    data, kind = found.config.data, found.config.model.kind
    if not same_tokens(found.language, corpus.language):
        raise ValueError(
            f"{workdir} was trained on other tokens: data.source {data.source!r}, "
            f"data.tokenizer {data.tokenizer!r}, model.kind {kind!r}"
        )
    return Folder(found.config.model, found.params, found.constants, {})


def _of_folder(folder: epath.Path, target: config.Model, corpus: Examples) -> Folder:
    """The weights of a folder, of symjax or of transformers."""
    with local_copy(folder, *SUFFIXES) as here:
        found = read_folder(here)
    language = found.about.get("language")
    if language is not None and not same_tokens(language, corpus.language):
        raise ValueError(f"the model in {folder} was trained on other tokens")
    if given := _given(found.options, target):
        raise ValueError(f"{folder} needs {' '.join(given)}")
    if language is None and is_process_zero():
        print_warning(
            f"init_from: {folder} does not say what its {found.options.vocabulary} "
            f"tokens are: the {corpus.vocabulary} of data.tokenizer take their place"
        )
    return found


def _given(source: config.Model, target: config.Model) -> list[str]:
    """The keys that make a target whose weights fit, in words of a command line."""
    given = []
    for name, _, _ in validation.fields(config.Model):
        one, other = (attrgetter(name)(x) for x in (source, target))
        turned, group = name.startswith("rope_"), name.split(".")[0]
        if one != other and (turned or group not in FREE):
            given.append(f"--config.model.{name}={one}")
    before, after = sizes(source), sizes(target)
    if after.kv_heads % before.kv_heads:
        given.append(f"--config.model.kv_heads={before.kv_heads}")
    if before.value_size != after.value_size:
        halves = 2 if target.attention.differential == "v1" else 1
        given.append(f"--config.model.head_size={before.value_size // halves}")
    hidden = [x.feedforward or 4 * x.width for x in (source, target)]
    if hidden[0] != hidden[1]:
        given.append(f"--config.model.feedforward={hidden[0]}")
    return given


def _placed(values: Any, like: Any) -> Any:
    """Arrays where those of another tree of the same kind are.

    Copies: a conversion may give two weights one array, and a step donates each.
    """
    places = jax.tree.map(lambda x: x.sharding, like)
    return jax.device_put(values, places, may_alias=False)
