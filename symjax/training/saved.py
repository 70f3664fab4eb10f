"""A model as a run saved it: weights, configuration and tokens, without its data."""

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
from symjax.models.build import abstract, parts
from symjax.storage import resolve
from symjax.training.optimizer import average_of, optimizer
from symjax.training.preflight import data_folder, saved_options, with_vocabulary
from symjax.training.step import State


class Saved(NamedTuple):
    """A checkpoint.

    Attributes:
        config: with the vocabulary, or size of images, that the data gave the model.
        language: as `Examples.language`: what its tokens mean.
        labels: as `Examples.labels`: the names of its classes.
    """

    step: int
    config: config.Config
    language: dict[str, Any]
    labels: tuple[str, ...]
    params: dict[str, Any]
    constants: dict[str, Any]

    def __repr__(self) -> str:
        """Without its arrays."""
        what = config.attention_of(self.config.model)
        return f"{type(self).__name__}(step {self.step}: {what})"


def described(examples: Examples, model: config.Model) -> dict[str, Any]:
    """What a checkpoint says of the examples, so that it can be used without them."""
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
    """The newest whole checkpoint of a workdir, the one of `step`, or the best one.

    Reads the folder `checkpoints` alone; `data` too where a checkpoint is older than
    the descriptions in it.

    Args:
        ema: take the mean of the weights that the run kept by optimizer.ema.
    Raises:
        ValueError: there is no such checkpoint, it is damaged, or it has no mean of the
            weights.
    """
    workdir = resolve(workdir)
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        meta = checkpoints.read_meta(step, best=best)
        options, about = _options(meta, workdir)
        (params, constants), moments = parts(abstract(options.model)), None
        if ema:
            check_average(options, workdir)
            moved = optimizer(options.optimizer, options.steps, params)
            moments = jax.eval_shape(moved.init, params)
        everywhere = processes.replicated()
        state, constants = jax.tree.map(
            lambda x: x.update(sharding=everywhere),
            (State(None, params, moments), constants),
        )
        trees, meta = restored(checkpoints, state, constants, ema, step, best=best)
    language, labels = about["language"], tuple(about["labels"])
    return Saved(meta["step"], options, language, labels, **trees)


def check_average(options: config.Config, workdir: epath.Path) -> None:
    """Raises: ValueError: a run has kept no mean of its weights."""
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
    """(params and constants, meta); the mean of the weights is with the optimizer."""
    weights = "optimizer" if ema else "params"
    wanted = {weights: getattr(state, weights), "constants": constants}
    trees, meta = checkpoints.restore(wanted, step, best=best)
    params = average_of(trees["optimizer"]) if ema else trees["params"]
    return {"params": params, "constants": trees["constants"]}, meta


def _options(
    meta: dict[str, Any], workdir: epath.Path
) -> tuple[config.Config, dict[str, Any]]:
    """The configuration of the model as it was built, and what `described` said."""
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
    """`Examples.language` of a checkpoint.

    Older checkpoints do not name the token before a document. Where documents were
    joined, which was so before there was a key for it, rows of training had it.
    """
    language, fingerprint = meta["examples"]["language"], meta.get("data") or {}
    counts = [fingerprint.get(split) or {} for split in SPLITS]
    several = any(its.get("documents", 1) > 1 for its in counts)
    documents = meta["config"]["data"].get("documents", "joined")
    text = "kind" in language and "mask" not in language
    if START in language or not text or not several or documents != "joined":
        return language
    start = boundaries(from_description(language), several=True).start
    return language if start is None else {**language, START: start}
