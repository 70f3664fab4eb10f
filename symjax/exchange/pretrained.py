"""Folders of weights: written by `save_pretrained`, read by `load_pretrained`.

If transformers has a model with the same logits, the folder is written in the format of
transformers.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from etils import epath

from symjax import validation
from symjax.config import Config
from symjax.data import subwords
from symjax.data.examples import START, tokenizer_of
from symjax.data.subwords import SubwordTokenizer
from symjax.distributed.exit_codes import print_warning
from symjax.distributed.launch import is_process_zero
from symjax.exchange.card import no_tokenizer, read_results, to_card
from symjax.exchange.loaded import Loaded
from symjax.imports import Words, to_store, using
from symjax.models.build import merged, weights_and_constants
from symjax.models.huggingface.files import (
    INDEX,
    SHARD,
    TENSORS,
    digest_of,
    in_shards,
    index_of,
    write_tensors,
)
from symjax.models.huggingface.folders import (
    OWN,
    SETTINGS,
    SUFFIXES,
    as_family,
    options_of,
    own_tensors,
    read_folder,
)
from symjax.storage import (
    check_writable,
    local_copy,
    replaced,
    resolve_url,
    store_errors,
)

CARD = "README.md"
FORMATS = ("auto", "transformers", "symjax")
SHARD_SIZE = 5 * 10**9  # bytes, the default of transformers


def save_pretrained(
    loaded: Loaded,
    folder: str | os.PathLike[str],
    *,
    results: str | os.PathLike[str] | None = None,
    format: str = "auto",
    shard_size: int = SHARD_SIZE,
) -> str:
    """Write a model as a folder: weights, configuration, tokenizer and a model card.

    If transformers has a model that computes the same logits, the format is that of
    transformers: a softmax decoder is written as a Llama, one with learned positions as
    a GPT-2, and a differential decoder (V1) as a DiffLlama. Symmetric keys are written
    as separate key weights. Weights are float32.

    A subword tokenizer is written as tokenizer.json, which AutoTokenizer of
    transformers reads. Byte and character tokenizers are described in symjax.json; in
    the format of transformers, a warning says that AutoTokenizer finds none.

    Args:
        folder: created if it is missing; also gs://BUCKET/FOLDER. Weights, settings and
            tokenizer files that are already there are replaced or removed.
        results: the JSON of `eval.py --json`, whose numbers the card shows.
        format: "transformers" refuses a model that transformers cannot load. "symjax"
            writes symjax's own format. "auto" writes the format of transformers if
            possible, and otherwise symjax's own.
        shard_size: largest number of bytes of tensors in one file. Larger models become
            several files and model.safetensors.index.json.
    Returns:
        The format that was written: llama, diffllama, gpt2, or symjax.
    Raises:
        ValueError: `loaded` is not a `Loaded`; transformers has no such model (the
            message names every key that differs); the results are not those of these
            weights; or the folder cannot be written, or is the workdir of a run.
    """
    if not isinstance(loaded, Loaded):
        raise ValueError(
            "save_pretrained needs a model as symjax.load returns it, got a "
            f"{type(loaded).__name__}"
        )
    if format not in FORMATS:
        raise ValueError(
            f"format {format!r} is unknown: choose from {', '.join(FORMATS)}"
        )
    place, numbers = resolve_url(folder), read_results(results)
    with store_errors(place):
        if (place / "checkpoints").is_dir():
            raise ValueError(f"{folder} is the workdir of a run: give another folder")
    settings, tensors, reason = _contents(loaded, format)
    shards = in_shards(tensors, shard_size)
    kind = settings.get("model_type", "symjax")
    about = {
        "format": kind,
        "step": loaded.step,
        "digest": digest_of(tensors),
        "config": validation.to_dict(loaded.config),
        "language": loaded.language,
        "labels": list(loaded.labels),
        "ema": loaded.ema,
        "imports": to_store(dataclasses.asdict(loaded.config.model)),
    }
    texts = {OWN: _json(about), CARD: to_card(loaded, reason, numbers)}
    if isinstance(tokenizer := loaded.tokenizer, SubwordTokenizer):
        trained = loaded.step > 0  # 0: loaded from a folder of another library
        texts |= tokenizer.files(loaded.config.model.length, trained=trained)
    if settings and tokenizer is not None:
        known = loaded.delimiters
        settings |= {"bos_token_id": known.start, "eos_token_id": known.end}
    if settings:
        texts[SETTINGS] = _json(settings)
    if len(shards) > 1:
        texts[INDEX] = _json(index_of(shards))
    check_writable(place, f"weights in {folder}")
    with replaced(place, *shards, *texts) as unfinished:
        for name, some in shards.items():
            write_tensors(unfinished / name, some)
        for name, text in texts.items():
            (unfinished / name).write_text(text, encoding="utf-8")
    with store_errors(place):
        _remove_others(place, {*shards, *texts})
    if settings and (line := no_tokenizer(loaded)) and is_process_zero():
        print_warning(f"{folder}: {line}")
    return kind


def _remove_others(folder: Path | epath.Path, kept: set[str]) -> None:
    """Remove the files of an earlier model, except `kept`, the files just written."""
    own = {SETTINGS, subwords.FILE, subwords.CONFIG_FILE, INDEX, TENSORS}
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if path.name not in kept and (path.name in own or SHARD.fullmatch(path.name)):
            path.unlink()


def load_pretrained(
    folder: str | os.PathLike[str],
    *,
    bos: bool | None = None,
    imports: Words = (),
) -> Loaded:
    """Load the model of a folder that symjax or transformers has written.

    The tokenizer of a Llama, DiffLlama or GPT-2 of transformers is read from the
    tokenizer.json in the folder. Without that file, `logits` and `losses` take token
    ids only.

    Args:
        bos: whether texts and prompts begin with the BOS token of the tokenizer. None
            means as in training, or as the tokenizer of a transformers folder says.
        imports: as in `symjax.load`.
    Raises:
        ValueError: a file is missing or damaged; the tokenizer has more tokens than the
            model; `bos` is true and there is no BOS token; or a setting of the model
            (the message names it) is not supported by the decoder.
    """
    with using(imports), local_copy(resolve_url(folder), *SUFFIXES) as here:
        found = read_folder(here)
        options, about = Config(), found.about
        if about:
            options = options_of(here, about)
        language = about.get("language") or _language(here, found.options.vocabulary)
        language = _with_bos(language, bos, here / subwords.FILE)
    options = dataclasses.replace(options, model=found.options)
    model = merged(found.options, found.params, found.constants)
    return Loaded(
        model,
        tokenizer_of(language),
        options,
        about.get("step", 0),
        tuple(about.get("labels", ())),
        language,
        about.get("ema", False),
    )


def _language(folder: Path, vocabulary: int) -> dict[str, Any]:
    """Return the description of the tokens in a tokenizer.json; {} without the file.

    A document is assumed to begin with the BOS token. Without a BOS token, a document
    is assumed to begin with the token that ends documents, as in EleutherAI's harness.

    Raises:
        ValueError: the tokenizer has more tokens than `vocabulary`.
    """
    if not (folder / subwords.FILE).is_file():
        return {}
    tokenizer = subwords.from_file(folder)
    if tokenizer.vocabulary > vocabulary:
        raise ValueError(
            f"{folder / subwords.FILE} has {tokenizer.vocabulary} tokens, the model "
            f"in its folder {vocabulary}"
        )
    begin = tokenizer.document_begin
    if begin is None:
        named = subwords.configured_token(folder / subwords.FILE, "bos_token")
        begin = tokenizer.token_of(named)
    if begin is None:
        begin = tokenizer.document_end
    return {**tokenizer.describe(), **({} if begin is None else {START: begin})}


def _with_bos(language: dict[str, Any], bos: bool | None, path: Path) -> dict[str, Any]:
    """Return the description of the tokens, in which texts begin with BOS or do not.

    Args:
        bos: as in `load_pretrained`; None changes nothing.
        path: the tokenizer.json.
    Raises:
        ValueError: `bos` is true, and there is no tokenizer.json or no BOS token.
    """
    tokenizer = tokenizer_of(language)
    if bos and not isinstance(tokenizer, SubwordTokenizer):
        raise ValueError(f"bos=True needs a tokenizer.json, {path.parent} has none")
    if bos is None or not isinstance(tokenizer, SubwordTokenizer):
        return language
    if bos and tokenizer.bos:
        return language
    changed = subwords.with_bos(tokenizer, str(bos).lower(), path)
    begin = {START: changed.document_begin} if bos else {}
    kept = {name: x for name, x in language.items() if name != "bos"}
    return {**kept, **changed.describe(), **begin}


def _contents(loaded: Loaded, format: str) -> tuple[dict, dict, str]:
    """Return (settings, tensors, why transformers cannot load the folder).

    In symjax's own format the settings are empty, because symjax.json has them.
    """
    reason = "format='symjax' was asked for"
    if format != "symjax":
        try:
            params, _ = weights_and_constants(loaded.model)
            return *as_family(loaded.config.model, params), ""
        except ValueError as error:
            if format == "transformers":
                raise
            reason = str(error)
    return {}, own_tensors(loaded.model), reason


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
