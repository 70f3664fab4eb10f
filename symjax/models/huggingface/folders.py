"""Folders of weights: models of Hugging Face, and symjax's own format.

config.json         settings of a Llama, DiffLlama or GPT-2; absent in symjax's format
model.safetensors   tensors, named as in that model or as in symjax
symjax.json         written by symjax: configuration, step, kind of tokens
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
from symjax.models.build import Model, abstract, weights_and_constants
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

# model_type → module. `options_of` and `settings_of` convert a config.json to symjax's
# configuration and back, `params_of` and `tensors_of` tensors to parameters and back.
FAMILIES: dict[str, Any] = {"llama": llama, "diffllama": llama, "gpt2": gpt2}
READ = "of Hugging Face's models, symjax reads Llama, DiffLlama and GPT-2"
SETTINGS, OWN = "config.json", "symjax.json"
SUFFIXES = ".json", ".safetensors"  # of files that are read
# Configuration keys that do not change the function of a trained model.
WITHOUT_EFFECT = (
    *("dropout", "embedding_scale", "dtype", "remat", "scan_layers", "length"),
    *("attention.implementation", "attention.chunk_size"),
    "attention.symmetric_initial",
)


class Folder(NamedTuple):
    """Contents of a folder of weights.

    Attributes:
        constants: random projections; empty for models of Hugging Face.
        about: contents of symjax.json; empty if another program wrote the folder.
    """

    options: config.Model
    params: dict[str, Any]
    constants: dict[str, Any]
    about: dict[str, Any]


def is_folder(directory: Path | epath.Path) -> bool:
    """Return whether a directory is a folder of weights and not a workdir."""
    return any((directory / name).is_file() for name in (SETTINGS, OWN))


def read_folder(directory: str | Path) -> Folder:
    """Read a folder that `save_pretrained` of symjax or transformers wrote.

    Raises:
        ValueError: a file is missing or damaged, symjax's decoder does not support a
            setting, or names and shapes of tensors do not fit the configuration.
    """
    directory = Path(directory)
    if not (directory / OWN).is_file():
        check_folder(directory, SETTINGS)
    about = require_imports(directory)
    if about.get("format") == "symjax":
        return _read_symjax_folder(directory, about)
    options, params = read_family(directory, digest=about.get("digest"))
    return Folder(options, params, {}, about)


def require_imports(directory: Path) -> dict[str, Any]:
    """Return the contents of a folder's symjax.json, {} if there is none.

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
    """Read a model of Hugging Face; return (configuration, parameters in float32).

    The configuration is symjax's.

    Args:
        model_types: accepted values of model_type. By default all that are known.
        digest: `digest_of` the tensors, if it is known.
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
        tensors.pop("lm_head.weight", None)  # a copy that some programs write
    try:
        like, _ = weights_and_constants(abstract(options))
    except ValueError as error:
        raise ValueError(f"{directory / SETTINGS}: {error}") from None
    wanted = jax.eval_shape(lambda params: family.tensors_of(params, options), like)
    shapes = {name: x.shape for name, x in wanted.items()}
    check_shapes(str(directory), tensors, shapes)
    return options, jax.tree.map(jnp.asarray, family.params_of(tensors, options))


def load_diffllama(directory: str | Path) -> tuple[config.Model, dict[str, Any]]:
    """Read a DiffLlama of Hugging Face: symjax's configuration and parameters.

        options, params = load_diffllama(directory)
        model = Decoder(options, rngs=nnx.Rngs(0))
        nnx.update(model, params)

    Dropout is not read. `dataclasses.replace` changes it and other options.

    Raises:
        ValueError: as `read_folder`, or the model is not a DiffLlama.
    """
    return read_family(Path(directory), "diffllama")


def as_family(
    options: config.Model, params: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (settings, tensors) of the Hugging Face model that equals a decoder.

    It is a DiffLlama, a Llama, or with learned positions a GPT-2. Symmetric keys and
    shared values become separate projections that compute equal keys and values.

    Raises:
        ValueError: no such model computes this function; the message names each key
            that differs.
    """
    differential = options.attention.differential == "v1"
    learned = options.positions == "learned"
    family: Any = gpt2 if learned and not differential else llama
    target = _resolved(options)
    symmetric, norm = options.attention.symmetric, options.attention.key_norm
    if symmetric in ("plain", "kv", "qkv") and norm == "none":
        chosen = dataclasses.replace(options.attention, symmetric="none")
        target = dataclasses.replace(target, attention=chosen)
    settings = family.settings_of(target)
    _check_equal(target, family.options_of(settings), settings["model_type"])
    return settings, family.tensors_of(convert(params, options, target), target)


def own_tensors(model: Model) -> dict[str, Any]:
    """Return weights and constants of a model by their paths."""
    params, constants = weights_and_constants(model)
    return flat({"params": params, "constants": constants})


def _read_symjax_folder(directory: Path, about: dict[str, Any]) -> Folder:
    options = options_of(directory, about).model
    shapes = {path: x.shape for path, x in own_tensors(abstract(options)).items()}
    tensors = read_tensors(directory, about.get("digest"))
    check_shapes(str(directory / TENSORS), tensors, shapes)
    trees = {"params": {}, "constants": {}} | nested(tensors)
    trees = jax.tree.map(jnp.asarray, trees)
    return Folder(options, trees["params"], trees["constants"], about)


def options_of(directory: Path, about: dict[str, Any]) -> config.Config:
    """Return the configuration in symjax.json.

    Raises:
        ValueError: this version cannot read it, or its values are out of range.
    """
    try:
        return validation.from_stored(about["config"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"the configuration in {directory / OWN}: {error}") from None


def _resolved(options: config.Model) -> config.Model:
    """Return the options with sizes in place of 0, their default."""
    resolved = sizes(options)
    return dataclasses.replace(
        options,
        kv_heads=resolved.kv_heads,
        head_size=resolved.head_size,
        feedforward=options.feedforward or 4 * options.width,
    )


def _check_equal(ours: config.Model, theirs: config.Model, kind: str) -> None:
    """Raise if keys that change the function differ, naming all of them."""
    wrong = []
    for name, _, _ in validation.fields(config.Model):
        value, wanted = map(attrgetter(name), (ours, theirs))
        if name not in WITHOUT_EFFECT and value != wanted:
            wrong.append(f"model.{name} is {value!r}, in a {kind} it is {wanted!r}")
    if wrong:
        raise ValueError(f"no model of transformers computes this: {'; '.join(wrong)}")
