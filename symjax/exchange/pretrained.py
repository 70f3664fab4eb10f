"""Folders of weights: written so that transformers loads them where it can."""

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
from symjax.models.build import merged, parts
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
SHARD_SIZE = 5 * 10**9  # bytes, as transformers has it


def save_pretrained(
    loaded: Loaded,
    folder: str | os.PathLike[str],
    *,
    results: str | os.PathLike[str] | None = None,
    format: str = "auto",
    shard_size: int = SHARD_SIZE,
) -> str:
    """Write a model as a folder: weights, configuration, tokenizer and a model card.

    A tokenizer of subwords is written as tokenizer.json, which AutoTokenizer of
    transformers reads; bytes and characters are in symjax.json alone, and a line says
    that AutoTokenizer finds none.

    A softmax decoder of the right shape becomes a Llama, with learned positions a
    GPT-2, a differential one (V1) a DiffLlama: transformers computes the same logits.
    Symmetric keys are written as keys of their own. Weights are float32.

    Args:
        folder: made if it is missing; files of these names are replaced. Also
            gs://BUCKET/FOLDER.
        results: the JSON of `eval.py --json`, whose numbers the card shows.
        format: "transformers" refuses what it cannot load, "symjax" writes any model
            under our own names, "auto" does the first where it can.
        shard_size: bytes of tensors in a file, at most; of more there are several and
            model.safetensors.index.json.
    Returns:
        What was written: llama, diffllama, gpt2, or symjax.
    Raises:
        ValueError: `loaded` is not a `Loaded`; transformers has no such model, naming
            every key that differs; the results are no JSON of eval.py for these
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
        trained = loaded.step > 0  # else the tokenizer is as another library used it
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
    """Remove what another model of this folder had, and this one has not."""
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
    """The model of a folder of `save_pretrained`, symjax's or that of transformers.

    The tokenizer of a Llama, DiffLlama or GPT-2 that transformers wrote is the
    tokenizer.json beside it; without one, `logits` and `losses` take token ids.

    Args:
        bos: whether texts and prompts begin with the BOS token of the tokenizer; None:
            as training had it, or, in a folder of transformers, as the tokenizer says.
        imports: as in `symjax.load`.
    Raises:
        ValueError: a file is missing or damaged, the tokenizer has more tokens than the
            model or no BOS token to begin with, or the model is one that the decoder
            does not compute, naming the setting.
    """
    with using(imports), local_copy(resolve_url(folder), *SUFFIXES) as here:
        found = read_folder(here)
        options, about = Config(), found.about
        if about:
            options = options_of(here, about)
        language = about.get("language") or _language(here, found.options.vocabulary)
        language = _begun(language, bos, here / subwords.FILE)
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
    """Return what a tokenizer.json says of the tokens of a model; {} without one.

    A document is taken to begin with the BOS token, or with the token that ends
    documents where there is none, as in the harness of EleutherAI.
    """
    if not (folder / subwords.FILE).is_file():
        return {}
    tokenizer = subwords.from_file(folder)
    if tokenizer.vocabulary > vocabulary:
        raise ValueError(
            f"{folder / subwords.FILE} has {tokenizer.vocabulary} tokens, the model "
            f"beside it {vocabulary}"
        )
    begin = tokenizer.document_begin
    if begin is None:
        named = subwords.configured_token(folder / subwords.FILE, "bos_token")
        begin = tokenizer.token_of(named)
    if begin is None:
        begin = tokenizer.document_end
    return {**tokenizer.describe(), **({} if begin is None else {START: begin})}


def _begun(language: dict[str, Any], bos: bool | None, path: Path) -> dict[str, Any]:
    """A language whose texts begin with the BOS token of its tokenizer, or do not.

    Raises:
        ValueError: there is no such token.
    """
    tokenizer = tokenizer_of(language)
    if bos and not isinstance(tokenizer, SubwordTokenizer):
        raise ValueError(f"bos: the tokens of {path.parent} are of no tokenizer.json")
    if bos is None or not isinstance(tokenizer, SubwordTokenizer):
        return language
    if bos and tokenizer.bos:
        return language
    changed = subwords.with_bos(tokenizer, str(bos).lower(), path)
    begin = {START: changed.document_begin} if bos else {}
    kept = {name: x for name, x in language.items() if name != "bos"}
    return {**kept, **changed.describe(), **begin}


def _contents(loaded: Loaded, format: str) -> tuple[dict, dict, str]:
    """(settings, tensors, why transformers cannot load it): no settings of our own
    names."""
    reason = "format='symjax' was asked for"
    if format != "symjax":
        try:
            params, _ = parts(loaded.model)
            return *as_family(loaded.config.model, params), ""
        except ValueError as error:
            if format == "transformers":
                raise
            reason = str(error)
    return {}, own_tensors(loaded.model), reason


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
