"""Read a run's checkpoint to use its model, without the data that it was trained on.

A checkpoint stores what its tokens mean (`described`), so `read_run` needs no data.
Only older checkpoints, which lack this description, need the folder `data`.
"""

import dataclasses
import os
from typing import Any, NamedTuple

import jax
from etils import epath

from symjax import config, validation
from symjax.checkpoints.checkpoint import Checkpoints
from symjax.data.boundaries import boundaries
from symjax.data.examples import START, Examples, open_examples, tokenizer_of
from symjax.data.store.folder import SPLITS
from symjax.data.store.manifest import MANIFEST
from symjax.data.tokens import from_description
from symjax.distributed import processes
from symjax.models.build import abstract, weights_and_constants
from symjax.storage import resolve
from symjax.training.optimizer import average_of, optimizer
from symjax.training.preflight import data_folder, saved_options, with_vocabulary
from symjax.training.step import State


class Saved(NamedTuple):
    """Model of a checkpoint.

    Attributes:
        step: step of the checkpoint.
        config: configuration, with the vocabulary or image size of the data.
        language: meaning of the tokens, as in `Examples.language`.
        labels: names of the classes, as in `Examples.labels`.
        params, constants: nested dicts of arrays.
    """

    step: int
    config: config.Config
    language: dict[str, Any]
    labels: tuple[str, ...]
    params: dict[str, Any]
    constants: dict[str, Any]

    def __repr__(self) -> str:
        """Return the step and the mechanism: arrays would fill pages."""
        what = config.attention_of(self.config.model)
        return f"{type(self).__name__}(step {self.step}: {what})"


def described(examples: Examples, model: config.Model) -> dict[str, Any]:
    """Return the description of examples that a checkpoint stores.

    With it the model can be used without the data.
    """
    return {
        "vocabulary": model.vocabulary,
        "image": list(model.image),
        "language": examples.language,
        "labels": list(examples.labels),
    }


def read_run(
    workdir: str | os.PathLike[str],
    step: int | None = None,
    *,
    best: bool = False,
    ema: bool = False,
) -> Saved:
    """Read a checkpoint of a workdir: by default the newest undamaged one.

    This function reads only the folder `checkpoints`. For an older checkpoint without a
    description of its examples (`described`), it reads the folder `data` too.

    Args:
        step: read the checkpoint of this step.
        best: read the checkpoint with the least held-out loss.
        ema: return the average of the weights that the run kept for optimizer.ema.
    Raises:
        ValueError: there is no such checkpoint; the checkpoint is damaged, has no
            average of the weights, or needs code that was not imported; or its
            configuration is not valid in this version.
    """
    workdir = resolve(workdir)
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        meta = checkpoints.read_meta(step, best=best)
        options, about = _model_and_examples(meta, workdir)
        params, constants = weights_and_constants(abstract(options.model))
        moments = None
        if ema:
            check_average(options, workdir)
            transform = optimizer(options.optimizer, options.steps, params)
            moments = jax.eval_shape(transform.init, params)
        replicated = processes.replicated()
        state, constants = jax.tree.map(
            lambda x: x.update(sharding=replicated),
            (State(None, params, moments), constants),
        )
        trees, meta = restored(checkpoints, state, constants, ema, step, best=best)
    language, labels = about["language"], tuple(about["labels"])
    return Saved(meta["step"], options, language, labels, **trees)


def check_average(options: config.Config, workdir: epath.Path) -> None:
    """Check that a run has kept an average of its weights.

    Raises:
        ValueError: it has not.
    """
    if not options.optimizer.ema:
        raise ValueError(
            f"{workdir} has no mean of its weights for ema: it was trained with "
            "optimizer.ema 0"
        )


def restored(
    checkpoints: Checkpoints,
    state: State,
    constants: Any,
    ema: bool,
    step: int | None = None,
    *,
    best: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Restore weights and constants from checkpoints.

    Args:
        state, constants: abstract arrays. `state.optimizer` is needed only with `ema`.
        ema: return the average of the weights, which the optimizer's state holds.
        step, best: as in `Checkpoints.restore`.
    Returns:
        The dict of params and constants, and the meta of the checkpoint.
    """
    weights = "optimizer" if ema else "params"
    wanted = {weights: getattr(state, weights), "constants": constants}
    trees, meta = checkpoints.restore(wanted, step, best=best)
    params = average_of(trees["optimizer"]) if ema else trees["params"]
    return {"params": params, "constants": trees["constants"]}, meta


def _model_and_examples(
    meta: dict[str, Any], workdir: epath.Path
) -> tuple[config.Config, dict[str, Any]]:
    """Return the configuration with the sizes of the data, and their description.

    The description is the one that `described` returns.
    """
    options, about = saved_options(meta, workdir), meta.get("examples")
    if about is None:
        folder = data_folder(workdir)
        if not (folder / MANIFEST).is_file():
            raise ValueError(
                f"checkpoint {meta['step']} of {workdir} does not say what its tokens "
                f"are: {folder} is needed, and has no {MANIFEST}"
            )
        examples = open_examples(options, folder)
        options = with_vocabulary(options, examples)
        return options, described(examples, options.model)
    try:
        sizes = {"vocabulary": about["vocabulary"], "image": tuple(about["image"])}
        model = dataclasses.replace(options.model, **sizes)
        validation.check(model, "model.")
        tokenizer_of(about["language"])
        tuple(about["labels"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"checkpoint {meta['step']} of {workdir} describes no examples: "
            f"{type(error).__name__} {error}"
        ) from None
    return dataclasses.replace(options, model=model), {
        **about,
        "language": language_of(meta),
    }


def language_of(meta: dict[str, Any]) -> dict[str, Any]:
    """Return `Examples.language` of a checkpoint.

    Older checkpoints do not name the token that starts a document. This function adds
    the token if their training text joined several documents. Checkpoints without the
    key `data.documents` are of a version that always joined documents.
    """
    language, fingerprint = meta["examples"]["language"], meta.get("data") or {}
    counts = [fingerprint.get(split) or {} for split in SPLITS]
    several = any(count.get("documents", 1) > 1 for count in counts)
    documents = meta["config"]["data"].get("documents", "joined")
    text = "kind" in language and "mask" not in language
    if START in language or not text or not several or documents != "joined":
        return language
    start = boundaries(from_description(language), several=True).start
    return language if start is None else {**language, START: start}
