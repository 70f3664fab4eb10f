"""Options and data that a run starts from, and those of its checkpoints."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from symjax import config, imports, validation
from symjax.checkpoints.checkpoint import Checkpoints
from symjax.data.boundaries import FORMAT
from symjax.data.examples import Examples, open_examples
from symjax.data.store.folder import arrays_in
from symjax.data.store.manifest import MANIFEST, format_of
from symjax.distributed.exit_codes import print_warning
from symjax.distributed.launch import is_process_zero
from symjax.models.huggingface.folders import is_folder, require_imports
from symjax.storage import download, local_copy, local_folder, store_errors, upload
from symjax.training.optimizer import state_layout
from symjax.training.workdir import locked, removed_on_failure


def saved_meta(
    options: config.Config, workdir: epath.Path, allow: Sequence[str] = ()
) -> dict[str, Any] | None:
    """The meta of the newest checkpoint; None where there is none.

    Its list `changed` ends with what differs in the keys that are allowed to.

    Raises:
        ValueError: it is damaged, or of a run whose configuration differs where it
            must not.
    """
    checkpoints = Checkpoints(workdir / "checkpoints")
    if not checkpoints.steps():
        return None
    meta = checkpoints.read_meta()
    saved = saved_options(meta, workdir, warn=lambda line: None)
    options = validation.continued(options, saved, allow)
    found = validation.differences(saved, options)
    model = dataclasses.asdict(options.model)
    if code := imports.differences(meta.get("imports"), model, str(workdir)):
        found["imports"] = f"imports: {', '.join(code)}"
    if refused := [line for name, line in found.items() if name not in allow]:
        raise ValueError(
            f"{workdir} holds a run of another configuration ({', '.join(refused)}): "
            "use its values, or another --workdir, or --allow KEYS to change them"
        )
    other = [line for name, line in found.items() if name.startswith("optimizer.")]
    if state_layout(saved) != state_layout(options):
        raise ValueError(
            f"{workdir} holds the arrays of another optimizer ({', '.join(other)}), "
            "which --allow cannot change: use its values, or another --workdir"
        )
    changed = [f"from step {meta['step']}: {line}" for line in found.values()]
    return {**meta, "changed": [*meta.get("changed", []), *changed]}


def as_begun(
    options: config.Config,
    meta: dict[str, Any] | None,
    workdir: epath.Path,
    allow: Sequence[str] = (),
) -> config.Config:
    """Return the configuration with the rules that the run of a checkpoint began with.

    Args:
        meta: of the newest checkpoint; None: the run is new.
        allow: keys that the run may change.
    """
    if meta is None:
        return options
    return validation.continued(options, saved_options(meta, workdir), allow)


def data_folder(workdir: epath.Path) -> Path:
    """Where the manifest of a run's data is, or a copy of the one in a bucket."""
    return download(workdir, f"data/{MANIFEST}").parent


def open_data(
    options: config.Config, workdir: epath.Path, meta: dict[str, Any] | None
) -> Examples:
    """Open the data of a run: the first process packs it, the others find it there.

    Args:
        meta: of the newest checkpoint, if there is one.
    Raises:
        ValueError: the data are damaged, too short, not to be seen by this process or
            not those of the checkpoint; or files that no run wrote have the names of a
            run's metrics. A run without a checkpoint is known by its data, which it
            finishes first.
    """
    folder = data_folder(workdir)
    there = (folder / MANIFEST).exists()
    if not is_process_zero() and not there:
        raise ValueError(
            f"{folder} has no {MANIFEST}, though process 0 has written it: --workdir "
            "must be a folder that all processes share"
        )
    with store_errors(workdir):
        found = [x for x in ("tensorboard", "metrics.jsonl") if (workdir / x).exists()]
    if found and not there and meta is None:
        raise ValueError(
            f"{workdir} has {', '.join(found)}, but no run: it would be overwritten; "
            "use another --workdir"
        )
    seen = FORMAT if meta is None else format_of(meta.get("data") or {})
    examples = open_examples(
        options,
        folder,
        replace=meta is None and is_process_zero(),
        format=seen,
    )
    if is_process_zero():
        upload(workdir, f"data/{MANIFEST}")
    if meta is not None:
        check_data(meta, examples, workdir)
    examples.check_length(options.model.length)
    return examples


def pack(options: config.Config, workdir: epath.Path, allow: Sequence[str] = ()) -> str:
    """Do what a run does before its first step to the data, and say where they are.

    Raises:
        ValueError: as `locked`, `saved_meta` and `open_data`.
    """
    with locked(workdir), removed_on_failure(workdir):
        examples = open_data(options, workdir, saved_meta(options, workdir, allow))
        if examples.stream:
            examples.stream.finish()
        place = arrays_in(options.data, local_folder(workdir) / "data")
    return f"{examples.size} in {place}, {examples.vocabulary:,} token types"


def saved_options(
    meta: dict[str, Any],
    workdir: epath.Path,
    warn: Callable[[str], None] = print_warning,
) -> config.Config:
    """The configuration in a checkpoint, which is data and so may hold anything.

    Args:
        warn: called with a line where code of this process is not the stored one.
    Raises:
        ValueError: it is none of this version, its values are out of range, or it
            needs code that was not given (`symjax.imports`).
    """
    tree = meta.get("config")
    where = f"checkpoint {meta['step']} of {workdir}"
    if not isinstance(tree, dict):
        raise ValueError(f"{where} has no configuration")
    imports.require(meta.get("imports"), tree.get("model"), where, warn)
    try:
        return validation.from_stored(tree)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"the configuration in {where}: {error}") from None


def require_stored(where: epath.Path) -> None:
    """Run the source that a run, or a folder of weights, stores for its model.

    Nothing is done where there is neither.

    Raises:
        ValueError: the user has not asked for it (`symjax.imports`), or it fails.
    """
    checkpoints = Checkpoints(where / "checkpoints")
    if checkpoints.steps():
        saved_options(checkpoints.read_meta(), where, warn=lambda line: None)
        return
    with store_errors(where):
        known = is_folder(where)
    if known:
        with local_copy(where, ".json") as here:
            require_imports(here)


def check_data(meta: dict[str, Any], corpus: Examples, workdir: epath.Path) -> None:
    """Raises: ValueError: the corpus is not the one that the checkpoint has seen."""
    saved = meta.get("data")
    then = str(saved.get("sha256")) if isinstance(saved, dict) else "unknown"
    now = corpus.fingerprint["sha256"]
    if then != now:
        raise ValueError(
            f"the text of {local_folder(workdir) / 'data'} is not the one of its "
            f"checkpoints (sha256 {now[:12]}, then {then[:12]})"
        )


def with_vocabulary(options: config.Config, corpus: Examples) -> config.Config:
    """The configuration with the data's vocabulary, or size of images, where it says 0.

    Raises:
        ValueError: the model's vocabulary is smaller than the tokenizer's, its classes
            are not those of the data, or it is for images and there are none.
    """
    if corpus.labels:
        check_labels(options.model, corpus)
        if corpus.image:
            model = dataclasses.replace(options.model, image=corpus.image)
            return dataclasses.replace(options, model=model)
    needed, given = corpus.vocabulary, options.model.vocabulary
    if given and given < needed:
        shown = {n: x for n, x in corpus.language.items() if n != "definition"}
        raise ValueError(
            f"model.vocabulary {given} is smaller than the {needed} tokens of data: "
            f"{shown}"
        )
    model = dataclasses.replace(options.model, vocabulary=given or needed)
    return dataclasses.replace(options, model=model)


def check_labels(model: config.Model, corpus: Examples) -> None:
    """Raises: ValueError: the model is for other examples, naming both."""
    if model.classes != len(corpus.labels):
        raise ValueError(
            f"model.classes {model.classes} must be the {len(corpus.labels)} of data: "
            f"{', '.join(corpus.labels)}"
        )
    if bool(model.patch) != bool(corpus.image):
        raise ValueError(
            f"model.patch is {model.patch}, but the data are "
            f"{'images: set it' if corpus.image else 'texts: leave it 0'}"
        )
    if corpus.image and model.image not in ((0, 0, 0), corpus.image):
        raise ValueError(
            f"model.image is {model.image}, the images of data are {corpus.image}"
        )
