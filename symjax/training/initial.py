"""First state of a run: from a checkpoint, from other weights, or new."""

import contextlib
from collections.abc import Iterator
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
from symjax.models.convert import MAY_DIFFER, carried, changes
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
) -> tuple[State, dict[str, Any], config.Config | None, config.Model | None]:
    """Restore the newest undamaged checkpoint; without checkpoints, make a new state.

    A new state has random weights, or the weights of `options.init_from`.

    Returns:
        The state; the constants (arrays that do not train, such as random projections);
        the configuration in the checkpoint, None for a new state; and the model's
        configuration in `init_from`, None if no weights were read from there.
    Raises:
        ValueError: the checkpoint does not fit the configuration, or the weights of
            `init_from` do not.
    """
    if not checkpoints.steps():
        state, constants, source = _new_state(options, program, examples)
        return state, constants, None, source
    like = program.state
    wanted = {"params": like.params, "optimizer": like.optimizer}
    trees, meta = checkpoints.restore({**wanted, "constants": program.constants})
    step = jax.device_put(jnp.int32(meta["step"]), like.step.sharding)
    workdir = checkpoints.directory.parent
    # `preflight.with_former_version` has already printed the warnings.
    saved = saved_options(meta, workdir, warn=lambda line: None)
    state = State(step, trees["params"], trees["optimizer"])
    return state, trees["constants"], saved, None


def _new_state(
    options: config.Config, program: Program, examples: Examples
) -> tuple[State, dict[str, Any], config.Model | None]:
    """Return a new state, its constants, and the model's configuration in `init_from`.

    The configuration is None if `init_from` is not set.
    """
    with jax.set_mesh(program.mesh):
        state, constants = program.initial(options.seed)
    model, source = program.model, None
    if options.init_from:
        origin = weights_of(options.init_from, model, examples)
        source = origin.options
        changed = changes(source, model)
        if changed and is_process_zero():
            print_warning(
                "init_from: before training the model computes another function, since "
                f"keys differ: {', '.join(changed)}"
            )
        state = state._replace(params=_placed(origin.params, state.params))
        found = carried(constants, origin.constants, origin.options, model)
        constants = _placed(found, constants)
    return state, constants, source


def check_origin(origin: str | Path) -> None:
    """Check that `init_from` names a workdir with checkpoints or a model's folder.

    A run calls this before it packs its data and compiles its step. `weights_of` checks
    the weights themselves.

    Raises:
        ValueError: `origin` names neither. The message begins with `init_from`.
    """
    with _errors_named():
        _located(origin)


def weights_of(origin: str | Path, target: config.Model, examples: Examples) -> Folder:
    """Return the weights of a run or of a model's folder, converted to `target`.

    Args:
        origin: a workdir with checkpoints, or a folder of weights in the format of
            symjax or of transformers.
        examples: data of the new run.
    Raises:
        ValueError: `origin` has no weights, or its weights do not fit the model, or
            they were trained on tokens with another meaning than those of `examples`.
            The message begins with `init_from`.
    """
    with _errors_named():
        where, is_model = _located(origin)
        if is_model:
            found = _folder_weights(where, target, examples)
        else:
            found = _run_weights(where, examples)
        return found._replace(params=convert(found.params, found.options, target))


@contextlib.contextmanager
def _errors_named() -> Iterator[None]:
    """Begin the message of a ValueError with `init_from`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"init_from: {error}") from None


def _located(origin: str | Path) -> tuple[epath.Path, bool]:
    """Return the place of `init_from`, and whether it is a model's folder."""
    where = resolve(origin)
    with store_errors(where):
        if is_folder(where):
            return where, True
        if (where / "checkpoints").is_dir():
            return where, False
    raise ValueError(
        f"{origin} is no workdir of train.py, nor a folder with a model"
        f"{from_the_hub(origin)}"
    )


def _run_weights(workdir: epath.Path, examples: Examples) -> Folder:
    """Return the newest weights of a workdir."""
    found = read_run(workdir)
    data, kind = found.config.data, found.config.model.kind
    if not same_tokens(found.language, examples.language):
        raise ValueError(
            f"{workdir} was trained on other tokens: data.source {data.source!r}, "
            f"data.tokenizer {data.tokenizer!r}, model.kind {kind!r}"
        )
    return Folder(found.config.model, found.params, found.constants, {})


def _folder_weights(
    folder: epath.Path, target: config.Model, examples: Examples
) -> Folder:
    """Return the weights of a folder in the format of symjax or of transformers."""
    with local_copy(folder, *SUFFIXES) as here:
        found = read_folder(here)
    language = found.about.get("language")
    if language is not None and not same_tokens(language, examples.language):
        raise ValueError(f"the model in {folder} was trained on other tokens")
    if needed := _needed_keys(found.options, target):
        raise ValueError(f"{folder} needs {' '.join(needed)}")
    if language is None and is_process_zero():
        print_warning(
            f"init_from: {folder} does not say what its {found.options.vocabulary} "
            f"tokens are: the {examples.vocabulary} of data.tokenizer take their place"
        )
    return found


def _needed_keys(source: config.Model, target: config.Model) -> list[str]:
    """Return the command-line options with which the weights of `source` fit `target`.

    The list is empty if the weights fit without them.
    """
    needed = []
    for name, _, _ in validation.fields(config.Model):
        wanted, actual = (attrgetter(name)(x) for x in (source, target))
        rotary, group = name.startswith("rope_"), name.split(".")[0]
        if wanted != actual and (rotary or group not in MAY_DIFFER):
            needed.append(f"--config.model.{name}={wanted}")
    before, after = sizes(source), sizes(target)
    if after.kv_heads % before.kv_heads:
        needed.append(f"--config.model.kv_heads={before.kv_heads}")
    if before.value_size != after.value_size:
        halves = 2 if target.attention.differential == "v1" else 1
        needed.append(f"--config.model.head_size={before.value_size // halves}")
    hidden = [x.feedforward or 4 * x.width for x in (source, target)]
    if hidden[0] != hidden[1]:
        needed.append(f"--config.model.feedforward={hidden[0]}")
    return needed


def _placed(values: Any, like: Any) -> Any:
    """Return copies of the arrays `values`, with the shardings of the arrays `like`.

    A conversion may use one array for two weights. A training step donates each weight,
    so each needs its own copy.
    """
    shardings = jax.tree.map(lambda x: x.sharding, like)
    return jax.device_put(values, shardings, may_alias=False)
