"""Checks before a run starts; a run that is refused leaves its workdir as it was."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock
import jax
from etils import epath

from symjax import config, validation
from symjax.data.examples import Examples, open_examples
from symjax.data.folder import arrays_in
from symjax.data.manifest import MANIFEST
from symjax.files import check_writable
from symjax.places import brought, home, reaching, sent, user_cache
from symjax.training.checkpoint import Checkpoints
from symjax.training.launch import is_process_zero
from symjax.training.optimizer import state_layout
from symjax.training.progress import print_warning
from symjax.training.sharding import shard_bytes
from symjax.training.step import Program

# What a run makes inside its workdir, and while it lives the lock.
PARTS = ("checkpoints", "data", "tensorboard", "wandb", "profile", "metrics.jsonl")
LOCK = "lock"
GIB = 2**30


@contextlib.contextmanager
def locked(workdir: epath.Path) -> Iterator[None]:
    """Make the workdir, and keep other runs out of it until the block ends.

    The lock is the kernel's, so a process that is killed leaves none. Folders that the
    block has not filled are removed again. Reading needs no lock. A bucket has none:
    there, only other runs of this machine are kept out.

    Raises:
        ValueError: the workdir cannot be made or written, or another process has it.
    """
    here = home(workdir)
    folders = [x for x in (here, *here.parents) if not x.exists()]
    what = f"--workdir {str(workdir)!r}"
    check_writable(workdir, what)
    check_writable(here, f"{here}, which {what} needs,")
    try:
        with _lock(workdir) if is_process_zero() else contextlib.nullcontext():
            yield
    finally:
        with contextlib.suppress(OSError):
            for folder in folders:
                folder.rmdir()


@contextlib.contextmanager
def removed_on_failure(workdir: epath.Path) -> Iterator[None]:
    """Whatever ends the block early, the parts of a run that it made are removed."""
    folders = {epath.Path(home(workdir)), epath.Path(workdir)}
    parts = [folder / name for folder in folders for name in PARTS]
    with reaching(workdir):
        parts = [part for part in parts if not part.exists()]
    try:
        yield
    except BaseException:
        for part in parts:
            with contextlib.suppress(OSError), reaching(workdir):
                part.rmtree(missing_ok=True)
        raise


@contextlib.contextmanager
def _lock(workdir: epath.Path) -> Iterator[None]:
    path = home(workdir) / LOCK
    lock = filelock.FileLock(path, blocking=False)
    try:
        lock.acquire()
        path.write_text(str(os.getpid()))  # for people
    except filelock.Timeout:
        raise ValueError(
            f"--workdir {str(workdir)!r} is in use by process {path.read_text()}: wait "
            "for it, or use another"
        ) from None
    except OSError as error:
        print_warning(
            f"{path} cannot be locked ({error.strerror}): start no second run in it"
        )
    try:
        yield
    finally:
        if lock.is_locked:
            path.unlink(missing_ok=True)  # before it is released: it is still ours
            lock.release()


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
    saved = saved_options(meta, workdir)
    found = validation.differences(saved, options)
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


def data_folder(workdir: epath.Path) -> Path:
    """Where the manifest of a run's data is, or a copy of the one in a bucket."""
    return brought(workdir, f"data/{MANIFEST}").parent


def open_data(
    options: config.Config, workdir: epath.Path, meta: dict[str, Any] | None
) -> Examples:
    """What a run learns: the first process packs it, the others find it there.

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
    with reaching(workdir):
        found = [x for x in ("tensorboard", "metrics.jsonl") if (workdir / x).exists()]
    if found and not there and meta is None:
        raise ValueError(
            f"{workdir} has {', '.join(found)}, but no run: it would be overwritten; "
            "use another --workdir"
        )
    examples = open_examples(
        options, folder, replace=meta is None and is_process_zero()
    )
    if is_process_zero():
        sent(workdir, f"data/{MANIFEST}")
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
        place = arrays_in(options.data, home(workdir) / "data")
    return f"{examples.size} in {place}, {examples.vocabulary:,} token types"


def saved_options(meta: dict[str, Any], workdir: epath.Path) -> config.Config:
    """The configuration in a checkpoint, which is data and so may hold anything.

    Raises:
        ValueError: it is none of this version, or its values are out of range.
    """
    tree = meta.get("config")
    where = f"checkpoint {meta['step']} of {workdir}"
    if not isinstance(tree, dict):
        raise ValueError(f"{where} has no configuration")
    try:
        return validation.from_dict(tree)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"the configuration in {where}: {error}") from None


def check_data(meta: dict[str, Any], corpus: Examples, workdir: epath.Path) -> None:
    """Raises: ValueError: the corpus is not the one that the checkpoint has seen."""
    saved = meta.get("data")
    then = str(saved.get("sha256")) if isinstance(saved, dict) else "unknown"
    now = corpus.fingerprint["sha256"]
    if then != now:
        raise ValueError(
            f"the text of {home(workdir) / 'data'} is not the one of its checkpoints "
            f"(sha256 {now[:12]}, then {then[:12]})"
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


def compiled_step(
    program: Program, shape: tuple[int, int], *, refuse: bool = True
) -> jax.stages.Compiled:
    """The training step for batches of `shape`, compiled.

    Args:
        refuse: what does not fit; False for devices that are not there.
    Raises:
        ValueError: it needs more memory than there is.
    """
    if refuse:  # here too, since sizes beyond all bounds may end a compiler
        state = shard_bytes((program.state, program.constants))
        batch = 2 * 4 * math.prod(shape) // program.mesh.size
        check_memory(state + batch, "weights, optimizer and batch alone take")
    step = program.lower(shape).compile()
    memory = step.memory_analysis()
    if refuse and memory is not None:
        needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        check_memory(needed, "a training step takes")
    return step


def check_memory(needed: int, what: str) -> None:
    """Refuse what a device cannot hold, instead of being killed half-way.

    Raises:
        ValueError: naming both sizes.
    """
    there = _memory_of_a_device()
    if needed > there:
        raise ValueError(
            f"{what} {needed / GIB:,.1f} GiB a device, there are {there / GIB:,.1f}: "
            "choose a smaller model or batch_size, a larger optimizer.accumulate, or "
            "model.remat=full"
        )


def use_compile_cache() -> None:
    """Keep compiled programs in the user's cache folder, unless jax has one set."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(user_cache("jax")))


def _memory_of_a_device() -> float:
    """Bytes; infinite where the platform does not tell."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit:
        return limit
    if device.platform != "cpu" or not hasattr(os, "sysconf"):
        return math.inf
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return physical / jax.local_device_count()
