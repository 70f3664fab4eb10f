"""Checks before a run starts: its configuration and its data against its checkpoints.

`saved_meta` compares the configuration with the newest checkpoint.
`with_former_version` returns the configuration to train with. `open_data` opens or
packs the data and compares their hash with the hash in the checkpoint.
`with_vocabulary` sets the sizes that depend on the data. `pack` packs the data of a run
without training.
"""

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
    """Return the metadata of the newest checkpoint; None if there is no checkpoint.

    A checkpoint with damaged metadata is passed over. Differences in allowed keys are
    added to the list `changed` of the metadata.

    Args:
        options: configuration of the run that starts.
        allow: keys that may differ from the checkpoint's.
    Raises:
        ValueError: the metadata of all checkpoints is damaged, or the configuration
            differs in a key that may not change.
    """
    checkpoints = Checkpoints(workdir / "checkpoints")
    if not checkpoints.steps():
        return None
    meta = checkpoints.read_meta()
    saved = saved_options(meta, workdir, warn=lambda line: None)
    options = validation.continued(options, saved, allow)
    differences = validation.differences(saved, options)
    model = dataclasses.asdict(options.model)
    if code := imports.differences(meta.get("imports"), model, str(workdir)):
        differences["imports"] = f"imports: {', '.join(code)}"
    if refused := [line for key, line in differences.items() if key not in allow]:
        raise ValueError(
            f"{workdir} holds a run of another configuration ({', '.join(refused)}): "
            "use its values, or another --workdir, or --allow KEYS to change them"
        )
    other = [line for key, line in differences.items() if key.startswith("optimizer.")]
    if state_layout(saved) != state_layout(options):
        raise ValueError(
            f"{workdir} holds the arrays of another optimizer ({', '.join(other)}), "
            "which --allow cannot change: use its values, or another --workdir"
        )
    changed = [f"from step {meta['step']}: {line}" for line in differences.values()]
    return {**meta, "changed": [*meta.get("changed", []), *changed]}


def with_former_version(
    options: config.Config,
    meta: dict[str, Any] | None,
    workdir: epath.Path,
    allow: Sequence[str] = (),
) -> config.Config:
    """Return the configuration with the `optimizer.version` that the run began with.

    Args:
        meta: metadata of the newest checkpoint; None for a new run.
        allow: keys that the run may change.
    """
    if meta is None:
        return options
    return validation.continued(options, saved_options(meta, workdir), allow)


def data_folder(workdir: epath.Path) -> Path:
    """Return the local folder that has the manifest of a run's data.

    If the run is in a bucket, the manifest is downloaded first.
    """
    return download(workdir, f"data/{MANIFEST}").parent


def open_data(
    options: config.Config, workdir: epath.Path, meta: dict[str, Any] | None
) -> Examples:
    """Open the data of a run. Process 0 calls this first, and packs them if needed.

    Args:
        meta: metadata of the newest checkpoint; None if there is no checkpoint.
    Raises:
        ValueError: the data are damaged, too short or not those of the checkpoint; this
            process does not see the workdir of process 0; or the workdir has metrics
            but neither data nor checkpoints, so a new run would overwrite the metrics.
    """
    folder = data_folder(workdir)
    packed = (folder / MANIFEST).exists()
    if not is_process_zero() and not packed:
        raise ValueError(
            f"{folder} has no {MANIFEST}, though process 0 has written it: --workdir "
            "must be a folder that all processes share"
        )
    with store_errors(workdir):
        taken = [x for x in ("tensorboard", "metrics.jsonl") if (workdir / x).exists()]
    if taken and not packed and meta is None:
        raise ValueError(
            f"{workdir} has {', '.join(taken)}, but no run: it would be overwritten; "
            "use another --workdir"
        )
    format = FORMAT if meta is None else format_of(meta.get("data") or {})
    examples = open_examples(
        options,
        folder,
        replace=meta is None and is_process_zero(),
        format=format,
    )
    if is_process_zero():
        upload(workdir, f"data/{MANIFEST}")
    if meta is not None:
        check_data(meta, examples, workdir)
    examples.check_length(options.model.length)
    return examples


def pack(options: config.Config, workdir: epath.Path, allow: Sequence[str] = ()) -> str:
    """Pack the data of a run without training, and return a line that says where.

    Raises:
        ValueError: as `locked`, `saved_meta` and `open_data`.
    """
    with locked(workdir), removed_on_failure(workdir):
        examples = open_data(options, workdir, saved_meta(options, workdir, allow))
        if examples.stream:
            examples.stream.finish()
        folder = arrays_in(options.data, local_folder(workdir) / "data")
    return f"{examples.size} in {folder}, {examples.vocabulary:,} token types"


def saved_options(
    meta: dict[str, Any],
    workdir: epath.Path,
    warn: Callable[[str], None] = print_warning,
) -> config.Config:
    """Return the configuration in a checkpoint, checked like one from a user.

    Args:
        meta: metadata of the checkpoint.
        warn: called with a line if this process imported other code than the
            checkpoint stores.
    Raises:
        ValueError: the checkpoint has no configuration that this version can read, a
            value is out of range, or code that it needs was not imported
            (`symjax.imports`).
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
    """Import the code that a run or a folder of weights stores for its model.

    Nothing happens if `where` is neither.

    Raises:
        ValueError: the user has not allowed this code (`symjax.imports`), or the code
            fails.
    """
    checkpoints = Checkpoints(where / "checkpoints")
    if checkpoints.steps():
        saved_options(checkpoints.read_meta(), where, warn=lambda line: None)
        return
    with store_errors(where):
        weights = is_folder(where)
    if weights:
        with local_copy(where, ".json") as here:
            require_imports(here)


def check_data(meta: dict[str, Any], examples: Examples, workdir: epath.Path) -> None:
    """Check that the data are those that the checkpoint was trained on.

    Raises:
        ValueError: they are not.
    """
    saved = meta.get("data")
    then = str(saved.get("sha256")) if isinstance(saved, dict) else "unknown"
    now = examples.fingerprint["sha256"]
    if then != now:
        raise ValueError(
            f"the text of {local_folder(workdir) / 'data'} is not the one of its "
            f"checkpoints (sha256 {now[:12]}, then {then[:12]})"
        )


def with_vocabulary(options: config.Config, examples: Examples) -> config.Config:
    """Return the configuration with the data's vocabulary or image size filled in.

    A vocabulary that is set (not 0) stays.

    Raises:
        ValueError: the model's vocabulary is smaller than the tokenizer's, the model's
            classes or image size are not those of the data, or only one of model and
            data is for images.
    """
    if examples.labels:
        check_labels(options.model, examples)
        if examples.image:
            model = dataclasses.replace(options.model, image=examples.image)
            return dataclasses.replace(options, model=model)
    needed, given = examples.vocabulary, options.model.vocabulary
    if given and given < needed:
        shown = {k: x for k, x in examples.language.items() if k != "definition"}
        raise ValueError(
            f"model.vocabulary {given} is smaller than the {needed} tokens of data: "
            f"{shown}"
        )
    model = dataclasses.replace(options.model, vocabulary=given or needed)
    return dataclasses.replace(options, model=model)


def check_labels(model: config.Model, examples: Examples) -> None:
    """Check that classes, patches and image size of a model fit labelled data.

    Raises:
        ValueError: they do not; the message names both sides.
    """
    if model.classes != (count := len(examples.labels)):
        raise ValueError(
            f"model.classes {model.classes} must be the {count} of data: "
            f"{', '.join(examples.labels)}"
        )
    if bool(model.patch) != bool(examples.image):
        raise ValueError(
            f"model.patch is {model.patch}, but the data are "
            f"{'images: set it' if examples.image else 'texts: leave it 0'}"
        )
    if examples.image and model.image not in ((0, 0, 0), examples.image):
        raise ValueError(
            f"model.image is {model.image}, the images of data are {examples.image}"
        )
