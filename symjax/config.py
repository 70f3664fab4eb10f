"""The keys of a run: names, defaults, meanings. The only place where they are written.

A configuration file (`configs/NAME.py`) changes some of them, a command line some more
(`--config.model.depth=6`), a checkpoint stores them all, and `train.py --help` prints
this file. Everything here is plain data: no jax, no flax.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


def key(default: Any, meaning: str, choices: tuple[str, ...] = ()) -> Any:
    """One key: its default, its meaning, and the values it may take (any if empty)."""
    return dataclasses.field(
        default=default, metadata={"meaning": meaning, "choices": choices}
    )


def group(kind: type) -> Any:
    return dataclasses.field(default_factory=kind)


@dataclass(frozen=True)
class Attention:
    """How tokens look at each other: four independent choices and their options."""

    mechanism: str = key(
        "softmax",
        "what a pair of tokens is worth",
        ("softmax", "cosine", "linear", "performer"),
    )
    symmetric: str = key(
        "none",
        "how keys are made: own projection, the query itself, or U·query",
        ("none", "plain", "pairwise"),
    )
    differential: str = key(
        "none", "how maps combine: one map, or A₁ − λA₂", ("none", "v1")
    )
    depth_offset: int = key(
        0, "the depth of the first layer in λ_init = 0.8 − 0.6 exp(−0.3 depth)"
    )
    length_base: int = key(
        0, "scores times log n / log length_base, n the keys a row sees; 0: off"
    )
    mask_self: bool = key(False, "hide a token from itself unless it sees nothing else")
    query_key_norm: bool = key(False, "RMSNorm of every query and key head")
    key_norm: str = key(
        "none",
        "normalise symmetric keys: to length 1, or to root mean square 1",
        ("none", "unit", "rms"),
    )
    features: str = key(
        "", "feature map of linear and performer; empty: the mechanism's own"
    )
    feature_count: int = key(256, "random features a head (performer)")
    chunk_size: int = key(64, "tokens a chunk of the causal prefix sum")
    implementation: str = key(
        "rows",
        "how score mechanisms run: blocks of rows, or the whole map",
        ("rows", "whole"),
    )


@dataclass(frozen=True)
class Model:
    vocabulary: int = key(0, "token types; 0: as many as the tokenizer has")
    width: int = key(256, "features of the residual stream")
    depth: int = key(3, "number of blocks")
    heads: int = key(8, "output heads; a differential head has two branches inside")
    kv_heads: int = key(0, "key/value heads, a divisor of heads; 0: as many as heads")
    head_size: int = key(
        0, "query/key features a head; 0: width/heads, halved for differential V1"
    )
    feedforward: int = key(0, "hidden features of the feed-forward; 0: 4·width")
    activation: str = key(
        "relu", "of the feed-forward; swiglu adds a gate", ("relu", "gelu", "swiglu")
    )
    norm: str = key("layernorm", "before each sublayer", ("layernorm", "rmsnorm"))
    positions: str = key(
        "learned", "how a token knows its place", ("none", "learned", "rope")
    )
    rope_base: float = key(10000.0, "the longest wavelength of RoPE is 2π·rope_base")
    length: int = key(300, "tokens of context in training")
    bias: bool = key(True, "biases in the linear layers and in LayerNorm")
    dropout: float = key(0.0, "share dropped after attention and feed-forward")
    tie_embeddings: bool = key(False, "use the embedding table as the output layer")
    dtype: str = key(
        "float32",
        "of the computation; parameters stay float32",
        ("float32", "bfloat16"),
    )
    remat: bool = key(False, "recompute each block in the backward pass: less memory")
    attention: Attention = group(Attention)


@dataclass(frozen=True)
class Data:
    source: str = key(
        "stdlib",
        "where text comes from: Python's own standard library, or files",
        ("stdlib", "text"),
    )
    path: str = key("", "source=text: a file, a glob, or several joined by commas")
    tokenizer: str = key("byte", "what a token is", ("byte", "char"))


@dataclass(frozen=True)
class Optimizer:
    name: str = key("adamw", "optax optimizer", ("adamw", "adam", "lion", "sgd"))
    learning_rate: float = key(3e-4, "the peak of the schedule")
    schedule: str = key(
        "warmup_cosine_decay_schedule",
        "optax schedule",
        (
            "constant_schedule",
            "cosine_decay_schedule",
            "linear_schedule",
            "warmup_constant_schedule",
            "warmup_cosine_decay_schedule",
        ),
    )
    warmup: float = key(
        0.05,
        "linear warm-up of the warmup_ schedules: steps, or below 1 a share of "
        "decay_steps",
    )
    final: float = key(0.1, "learning rate at the end, as a share of the peak")
    decay_steps: int = key(
        0, "steps after which a schedule has reached its end; 0: the run's steps"
    )
    weight_decay: float = key(0.1, "of matrices; norms, biases and λ never decay")
    betas: tuple[float, float] = key((0.9, 0.95), "decay of the two moments")
    eps: float = key(1e-8, "added to the root of the second moment")
    clip: float = key(1.0, "largest norm of the whole gradient; 0: off")
    accumulate: int = key(1, "micro-batches a step; must divide batch_size")


@dataclass(frozen=True)
class Mesh:
    data: int = key(-1, "devices that split the batch; -1: what is left")
    fsdp: int = key(1, "devices that split batch, weights and optimizer")
    tensor: int = key(1, "devices that split heads and hidden features")
    sequence: int = key(1, "devices that split the tokens of a row")


@dataclass(frozen=True)
class Evaluate:
    every: int = key(500, "steps between held-out evaluations and samples; 0: never")
    batches: int = key(20, "held-out batches an evaluation")


@dataclass(frozen=True)
class Checkpoint:
    every: int = key(500, "steps between checkpoints; the last step is always saved")
    keep: int = key(2, "checkpoints kept")


@dataclass(frozen=True)
class Log:
    every: int = key(20, "steps between lines of metrics.jsonl and metrics.csv")
    tensorboard: bool = key(False, "also write TensorBoard event files")


@dataclass(frozen=True)
class Config:
    steps: int = key(3000, "optimizer steps of the run")
    batch_size: int = key(32, "rows a step, over all devices")
    seed: int = key(0, "of weights, shuffling and dropout")
    model: Model = group(Model)
    data: Data = group(Data)
    optimizer: Optimizer = group(Optimizer)
    mesh: Mesh = group(Mesh)
    evaluate: Evaluate = group(Evaluate)
    checkpoint: Checkpoint = group(Checkpoint)
    log: Log = group(Log)


# A resumed run must agree with its checkpoint in these; the rest may change.
FIXED = ("model", "data", "optimizer", "seed", "batch_size")


def fields(kind: type = Config, prefix: str = "") -> Iterator[tuple[str, type, Any]]:
    """Every key of a configuration as (dotted name, type, dataclass field)."""
    kinds = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name = prefix + field.name
        if dataclasses.is_dataclass(kinds[field.name]):
            yield from fields(kinds[field.name], name + ".")
        else:
            yield name, kinds[field.name], field


def from_dict(tree: dict[str, Any]) -> Config:
    """The configuration with the values of a nested dict, checked.

    Raises:
        ValueError: a key is unknown, or a value is not among its choices; the
            message names the key and what it may be.
    """
    return _build(Config, tree, "")


def to_dict(config: Config) -> dict[str, Any]:
    """A nested dict of plain values; `from_dict` is its inverse."""
    return dataclasses.asdict(config)


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """`key: left → right` for each FIXED key in which two configurations differ.

    A key that one of them does not have yet counts as its default.
    """
    left, right = (to_dict(from_dict(tree)) for tree in (left, right))
    lines = []
    for name, _, _ in fields():
        if name.split(".")[0] in FIXED:
            one, other = _lookup(left, name), _lookup(right, name)
            if one != other:
                lines.append(f"{name}: {one!r} → {other!r}")
    return lines


def _lookup(tree: dict[str, Any], name: str) -> Any:
    value: Any = tree
    for part in name.split("."):
        value = value[part]
    return value


def _build(kind: type, tree: dict[str, Any], prefix: str) -> Any:
    kinds = typing.get_type_hints(kind)
    known = {field.name: field for field in dataclasses.fields(kind)}
    values = {}
    for name, value in tree.items():
        if name not in known:
            raise ValueError(
                f"{prefix}{name} is unknown: choose from {', '.join(sorted(known))}"
            )
        if dataclasses.is_dataclass(kinds[name]):
            values[name] = _build(kinds[name], value, f"{prefix}{name}.")
        else:
            values[name] = _checked(f"{prefix}{name}", value, kinds[name], known[name])
    return kind(**values)


def _checked(name: str, value: Any, kind: Any, field: dataclasses.Field) -> Any:
    plain = typing.get_origin(kind) or kind
    if plain is tuple and isinstance(value, list):
        value = tuple(value)
    if plain is float and type(value) is int:
        value = float(value)
    if type(value) is not plain:
        raise ValueError(f"{name} must be {plain.__name__}, got {value!r}")
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise ValueError(
            f"{name} {value!r} is unknown: choose from {', '.join(choices)}"
        )
    return value
