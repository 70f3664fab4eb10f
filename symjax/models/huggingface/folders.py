"""Folders of weights: which of Hugging Face's models one is, and our own kind.

config.json         settings of a Llama, DiffLlama or GPT-2; none in our own kind
model.safetensors   tensors by the names of that model, or by our own
symjax.json         of folders that symjax wrote: configuration, tokens, step
"""

import dataclasses
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from etils import epath

from symjax import config, imports, validation
from symjax.layers.validate import sizes
from symjax.models.build import Model, abstract, parts
from symjax.models.convert import convert
from symjax.models.huggingface import gpt2, llama
from symjax.models.huggingface.files import (
    TENSORS,
    check_folder,
    check_shapes,
    read_json,
    read_tensors,
)
from symjax.models.huggingface.weights import flat, nested

# By model_type, a module: its `options_of` and `settings_of` turn a config.json into
# our configuration and back, `params_of` and `tensors_of` tensors into our parameters.
FAMILIES: dict[str, Any] = {"llama": llama, "diffllama": llama, "gpt2": gpt2}
READ = "of Hugging Face's models, symjax reads Llama, DiffLlama and GPT-2"
SETTINGS, OWN = "config.json", "symjax.json"
SUFFIXES = ".json", ".safetensors"  # of every file that is read
# Configuration keys that change no function of a trained model.
FREE = (
    *("dropout", "embedding_scale", "dtype", "remat", "scan_layers", "length"),
    *("attention.implementation", "attention.chunk_size"),
)


class Folder(NamedTuple):
    """What a folder of weights holds.

    Attributes:
        constants: random projections of our own kind; none of the others.
        about: of symjax.json; empty where another program wrote the folder.
    """

    options: config.Model
    params: dict[str, Any]
    constants: dict[str, Any]
    about: dict[str, Any]


def is_folder(directory: Path | epath.Path) -> bool:
    """Whether it is a folder of weights, and no workdir."""
    return any((directory / name).is_file() for name in (SETTINGS, OWN))


def read_folder(directory: str | Path) -> Folder:
    """A folder that `save_pretrained` wrote, symjax's or that of transformers.

    Raises:
        ValueError: a file is missing or damaged, a setting is one that the decoder does
            not have, or names and shapes differ from those of the configuration.
    """
    directory = Path(directory)
    if not (directory / OWN).is_file():
        check_folder(directory, SETTINGS)
    about = require_imports(directory)
    if about.get("format") == "symjax":
        return _own(directory, about)
    options, params = read_family(directory, digest=about.get("digest"))
    return Folder(options, params, {}, about)


def require_imports(directory: Path) -> dict[str, Any]:
    """Return symjax.json of a folder, empty where there is none.

    Raises:
        ValueError: the model needs code that was not given (`symjax.imports`).
    """
    path = directory / OWN
    about = read_json(path) if path.is_file() else {}
    tree = about.get("config")
    model = tree.get("model") if isinstance(tree, dict) else None
    imports.require(about.get("imports"), model, str(path))
    return about


def read_family(
    directory: Path, *model_types: str, digest: str | None = None
) -> tuple[config.Model, dict[str, Any]]:
    """Our configuration and parameters, in float32, of a model of Hugging Face.

    Args:
        model_types: those that are wanted; any known one by default.
        digest: of its tensors, if it is known.
    """
    check_folder(directory, SETTINGS)
    settings = read_json(directory / SETTINGS)
    kind, known = settings.get("model_type"), model_types or tuple(FAMILIES)
    try:
        if kind not in known:
            wanted = " or ".join(map(repr, known))
            raise ValueError(f"model_type must be {wanted}, got {kind!r}")
        family = FAMILIES[kind]
        options = family.options_of(settings)
    except ValueError as error:
        raise ValueError(f"{directory / SETTINGS}: {error} ({READ})") from None
    tensors = read_tensors(directory, digest)
    if family is gpt2:
        tensors = gpt2.renamed(tensors)
    if options.tie_embeddings:
        tensors.pop("lm_head.weight", None)  # some programs write it twice
    try:
        like, _ = parts(abstract(options))
    except ValueError as error:
        raise ValueError(f"{directory / SETTINGS}: {error}") from None
    theirs = jax.eval_shape(lambda params: family.tensors_of(params, options), like)
    shapes = {name: x.shape for name, x in theirs.items()}
    check_shapes(str(directory), tensors, shapes)
    return options, jax.tree.map(jnp.asarray, family.params_of(tensors, options))


def load_diffllama(directory: str | Path) -> tuple[config.Model, dict[str, Any]]:
    """A DiffLlama as Hugging Face stores it: our configuration and parameters.

        options, params = load_diffllama(directory)
        model = Decoder(options, rngs=nnx.Rngs(0))
        nnx.update(model, params)

    Dropout is not carried over; `dataclasses.replace` changes it and other options.

    Raises:
        ValueError: as `read_folder`, or the model is no DiffLlama.
    """
    return read_family(Path(directory), "diffllama")


def as_family(
    options: config.Model, params: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A decoder as (settings, tensors) of the model of Hugging Face that computes the
    same: a DiffLlama, a Llama, or with learned positions a GPT-2.

    Symmetric keys become keys of their own, the same function.

    Raises:
        ValueError: there is none; the message names every key that differs.
    """
    differential = options.attention.differential == "v1"
    learned = options.positions == "learned"
    family: Any = gpt2 if learned and not differential else llama
    target = _resolved(options)
    symmetric, norm = options.attention.symmetric, options.attention.key_norm
    if symmetric == "plain" and norm == "none":
        chosen = dataclasses.replace(options.attention, symmetric="none")
        target = dataclasses.replace(target, attention=chosen)
    settings = family.settings_of(target)
    _check_equal(target, family.options_of(settings), settings["model_type"])
    return settings, family.tensors_of(convert(params, options, target), target)


def own_tensors(model: Model) -> dict[str, Any]:
    """Weights and constants of any model by their paths."""
    params, constants = parts(model)
    return flat({"params": params, "constants": constants})


def _own(directory: Path, about: dict[str, Any]) -> Folder:
    options = options_of(directory, about).model
    shapes = {path: x.shape for path, x in own_tensors(abstract(options)).items()}
    tensors = read_tensors(directory, about.get("digest"))
    check_shapes(str(directory / TENSORS), tensors, shapes)
    trees = {"params": {}, "constants": {}} | nested(tensors)
    trees = jax.tree.map(jnp.asarray, trees)
    return Folder(options, trees["params"], trees["constants"], about)


def options_of(directory: Path, about: dict[str, Any]) -> config.Config:
    """The configuration in symjax.json.

    Raises:
        ValueError: it is none of this version, or its values are out of range.
    """
    try:
        return validation.from_stored(about["config"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"the configuration in {directory / OWN}: {error}") from None


def _resolved(options: config.Model) -> config.Model:
    """With the sizes that 0 stands for."""
    found = sizes(options)
    return dataclasses.replace(
        options,
        kv_heads=found.kv_heads,
        head_size=found.head_size,
        feedforward=options.feedforward or 4 * options.width,
    )


def _check_equal(found: config.Model, theirs: config.Model, kind: str) -> None:
    """Raises: ValueError: keys differ that change the function, naming all."""
    wrong = []
    for name, _, _ in validation.fields(config.Model):
        one, two = map(attrgetter(name), (found, theirs))
        if name not in FREE and one != two:
            wrong.append(f"model.{name} is {one!r}, in a {kind} it is {two!r}")
    if wrong:
        raise ValueError(f"no model of transformers computes this: {'; '.join(wrong)}")
