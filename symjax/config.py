"""Keys of a run: their names, defaults and meanings, written here and nowhere else.

A configuration file (`configs/NAME.py`) changes some keys. The command line changes
more (`--config.model.depth=6`). A checkpoint stores all of them, and `train.py --help`
prints their meanings. This file is plain data: it imports neither jax nor flax.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LARGEST = 2**31 - 1  # largest value of a number: it fits into 32 bits


def key(
    default: Any,
    meaning: str,
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] = (),
    *,
    least: float = -math.inf,
    most: float = LARGEST,
    former: dict[Any, Any] | None = None,
) -> Any:
    """Declare one key: its default, its meaning, and the values that it may take.

    Args:
        former: value of older configurations → present value.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "meaning": meaning,
            "choices": choices,
            "least": least,
            "most": most,
            "former": former or {},
        },
    )


class OwnOptions(dict[str, Any]):
    """Values of the options that mechanisms declare, by name.

    It is hashable, because layers hold it as static data.
    """

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self.items()))


class Keys:
    """Group of keys.

    An int becomes a float where the key is a float (clip=0), and a value of older
    configurations the present one (`key(…, former=…)`).
    """

    def __repr__(self) -> str:
        """Return the keys that differ from their defaults."""
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        values = [(x, getattr(self, x.name)) for x in fields]
        shown = [f"{x.name}={value!r}" for x, value in values if value != x.default]
        return f"{type(self).__name__}({', '.join(shown)})"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, field.name)
            if field.type == "float" and type(value) is int:
                object.__setattr__(self, field.name, float(value))
            elif field.type == "tuple[float, float]" and type(value) is tuple:
                pair = tuple(float(x) if type(x) is int else x for x in value)
                object.__setattr__(self, field.name, pair)
            elif field.type == "OwnOptions" and type(value) is dict:
                object.__setattr__(self, field.name, OwnOptions(value))
            elif (former := field.metadata.get("former")) and value in former:
                object.__setattr__(self, field.name, former[value])


def mechanisms() -> tuple[str, ...]:
    """Return the names in the table of mechanisms.

    The table is imported here and not above, because it imports jax.
    """
    from symjax.attention import MECHANISMS

    return tuple(MECHANISMS)


def feature_maps() -> tuple[str, ...]:
    """Return the names of feature maps: those of the tables, and the learned ones."""
    from symjax.attention import TABLES

    known = [name for table in TABLES["features"] for name in table]
    return ("", *dict.fromkeys(known), "hedgehog", "t2r")


def decays() -> tuple[str, ...]:
    """Return the names in the table of log-decays."""
    from symjax.attention import TABLES

    return tuple(TABLES["decay"][0])


@dataclass(frozen=True, repr=False)
class Attention(Keys):
    """Keys of the attention layer: mechanism, keys, differential maps, execution."""

    mechanism: str = key(
        "softmax",
        "the mechanism that computes the attention weights",
        mechanisms,
    )
    symmetric: str = key(
        "none",
        "keys. none: a projection of their own; plain: the queries; pairwise: U·query; "
        "kv: a projection of their own, which is also the values; qkv: the queries, "
        "which are also the values",
        ("none", "plain", "pairwise", "kv", "qkv"),
    )
    symmetric_initial: bool = key(
        False,
        "keys with a projection of their own: it begins as a copy of that of queries",
    )
    key_size: int = key(
        0,
        "features of a query or key per head, if values keep those of model.head_size; "
        "0: as many as model.head_size",
        least=0,
    )
    differential: str = key(
        "none",
        "differential attention A₁ − λA₂. v1: one λ a layer; v2: a λ for every token "
        "and head",
        ("none", "v1", "v2"),
    )
    signals: int = key(
        1,
        "differential v1: number of heads that share one noise map A₂ (grouped "
        "differential attention); each has its own signal map A₁",
        least=1,
    )
    depth_offset: int = key(
        0, "depth of the first layer in λ_init = 0.8 − 0.6 exp(−0.3 depth)", least=0
    )
    lambda_initial: float = key(
        -1.0,
        "differential v1: λ_init of all layers, below 1; -1: 0.8 − 0.6 exp(−0.3 depth)",
        least=-1,
    )
    head_norm: bool = key(
        True,
        "RMSNorm of every output head of differential v1, and of decay, delta and "
        "other mechanisms that have such a norm",
    )
    length_base: int = key(
        0,
        "multiply scores by log n / log length_base, where n is the number of keys "
        "that the row sees, at least 16; 0: off",
        least=0,
    )
    length_scale: str = key(
        "",
        "another law of length of the scores. learned: length_base times a learned "
        "factor per head (SSMax); adaptive: 1 + β (log(n + 1))^γ with β and γ from the "
        "token (ASEntmax); floor: 1 + 0.1 log(1 + ⌊n / 8192⌋) (Llama 4); distance: a "
        "factor and a shift by the distance of a pair (scale-invariant attention); "
        "empty: length_base alone",
        ("", "learned", "adaptive", "floor", "distance"),
    )
    window: int = key(
        0,
        "window n: a token sees itself and the n − 1 tokens before it, in an encoder "
        "also the n − 1 tokens after it; 0: all",
        least=0,
    )
    forget: str = key(
        "none",
        "forget gate of score mechanisms: a score falls by the log-decays between key "
        "and query. fox: learned, log sigmoid(W x + b) per head (the Forgetting "
        "Transformer); or a log-decay per head of model.attention.decay",
        decays,
    )
    sink: bool = key(
        False, "one learned logit per head in the denominator of a row of scores"
    )
    mask_self: bool = key(False, "hide a token from itself unless it sees nothing else")
    query_key_norm: bool = key(False, "RMSNorm of every query and key head")
    key_norm: str = key(
        "none",
        "normalise symmetric keys. unit: to length 1; rms: to root mean square 1",
        ("none", "unit", "rms"),
    )
    position_term: int = key(
        0,
        "add w·f(s) to the scores of key s and multiply scores by a, with a and w "
        "learned per head and this number of sinusoidal features f of the key's "
        "position; 0: off",
        least=0,
        most=2**16,
    )
    features: str = key(
        "",
        "feature map of linear and performer; empty: the default of the mechanism; "
        "hedgehog and t2r are learned",
        feature_maps,
    )
    feature_count: int = key(
        256, "number of random features, or of t2r's features, per head", least=1
    )
    feature_norms: str = key(
        "chi",
        "row norms of the random projection. chi: those of normal vectors; constant: "
        "√H",
        ("chi", "constant"),
    )
    decay: str = key(
        "retention",
        "log-decay. none; constant per head: retention (RetNet) and two published "
        "Lightning slopes; learned per channel: gated (GLA) and kda; learned per head: "
        "fox, the gate of the Forgetting Transformer, and mamba2, which in the decay "
        "mechanism also scales values and adds a skip",
        decays,
    )
    decay_heads: int = key(
        0,
        "constant log-decays: number of different rates, which the key/value heads "
        "repeat; 0: one rate for each key/value head",
        least=0,
    )
    function: str = key(
        "exp",
        "matrix_function: the function of A = QQᵀ that replaces the attention map",
        ("exp", "expm1", "resolvent", "resolventm1", "ones_plus"),
    )
    function_scale: float = key(
        1.0,
        "matrix_function: factor of A = QQᵀ / (n √H), where n is the number of visible "
        "tokens in an encoder, and model.length in a decoder",
        least=0,
    )
    normalise: str = key(
        "none",
        "matrix_function: divide each row of the map by its sum (rows) or its length "
        "(l2)",
        ("none", "rows", "l2"),
    )
    output_gate: str = key(
        "none",
        "multiply the output of every head, before the output projection, by silu(W x) "
        "(RetNet, GLA) or by sigmoid(W x) (gated attention); true means silu",
        ("none", "silu", "sigmoid"),
        former={True: "silu", False: "none", "true": "silu", "false": "none"},
    )
    short_convolution: int = key(
        0,
        "width in tokens of a causal convolution over queries, keys and values; 0: off",
        least=0,
    )
    chunk_size: int = key(
        64,
        "tokens in a chunk of the causal prefix sum, which changes rounding alone; "
        "flash: tokens in a group, which changes the result",
        least=1,
    )
    implementation: str = key(
        "auto",
        "how score mechanisms run over whole rows. auto: the first kernel that "
        "supports the call, else rows. rows: blocks of rows in XLA. whole: one map of "
        "all pairs. tpu, cudnn, gpu_differential: this kernel, of softmax. ring: "
        "softmax over mesh.sequence, in which keys travel and are not gathered. "
        "Decoding is always auto. fused and hopper are former names of tpu and "
        "gpu_differential",
        (
            *("auto", "rows", "whole", "tpu", "gpu_differential", "cudnn", "ring"),
            *("fused", "hopper"),
        ),
    )
    options: OwnOptions = key(
        OwnOptions(), "options that the mechanism declares itself, by name"
    )


@dataclass(frozen=True, repr=False)
class RopeScaling(Keys):
    """Scaling of RoPE for texts longer than those of training."""

    kind: str = key(
        "none",
        "none: no scaling; linear: smaller steps between positions; dynamic: a base "
        "that grows with the text; yarn and llama3: smaller steps for pairs of "
        "features that turn slowly, none for those that turn fast",
        ("none", "linear", "dynamic", "yarn", "llama3"),
    )
    factor: float = key(1.0, "ratio of the new length to the original length", least=1)
    original_length: int = key(
        0, "dynamic, yarn and llama3: tokens of context before the scaling", least=0
    )
    low_frequency_factor: float = key(
        1.0,
        "llama3: pairs with fewer turns in original_length tokens are slow",
        least=0,
    )
    high_frequency_factor: float = key(
        4.0,
        "llama3: pairs with more turns in original_length tokens are fast",
        least=0,
    )
    beta_fast: float = key(
        32.0, "yarn: pairs with more turns in original_length tokens are fast"
    )
    beta_slow: float = key(
        1.0, "yarn: pairs with fewer turns in original_length tokens are slow"
    )
    attention_factor: float = key(
        0.0,
        "yarn: factor of rotated queries and keys; 0: 0.1 ln factor + 1",
        least=0,
    )
    truncate: bool = key(
        True, "yarn: round the limits between slow and fast pairs to whole pairs"
    )


@dataclass(frozen=True, repr=False)
class Model(Keys):
    """Keys of the model."""

    kind: str = key(
        "decoder",
        "decoder: depth causal blocks; universal: one causal block applied depth times "
        "with halting; encoder: depth blocks in which every token sees all others",
        ("decoder", "universal", "encoder"),
    )
    vocabulary: int = key(
        0, "number of token types; 0: as many as the tokenizer has", least=0
    )
    classes: int = key(
        0, "encoder: number of labels; 0: it predicts masked tokens", least=0
    )
    patch: int = key(
        0,
        "encoder of images: height and width in pixels of a patch, which is one token; "
        "0: text",
        least=0,
    )
    image: tuple[int, int, int] = key(
        (0, 0, 0), "height, width and channels of images; 0: those of the data", least=0
    )
    width: int = key(256, "features of the residual stream", least=1)
    depth: int = key(3, "number of blocks", least=1, most=1000)
    heads: int = key(8, "output heads; a differential head has two branches", least=1)
    kv_heads: int = key(
        0, "key/value heads, a divisor of heads; 0: as many as heads", least=0
    )
    head_size: int = key(
        0,
        "features per head; 0: width/heads. Differential V1: features of a branch's "
        "queries and keys, half as many as its values have; 0: width/heads/2",
        least=0,
    )
    feedforward: int = key(
        0, "hidden features of the feed-forward; 0: 4·width", least=0
    )
    activation: str = key(
        "relu",
        "activation of the feed-forward; swiglu adds a gate",
        ("relu", "gelu", "swiglu"),
    )
    norm: str = key("layernorm", "norm before each sublayer", ("layernorm", "rmsnorm"))
    norm_eps: float = key(
        1e-5,
        "added to the variance in every LayerNorm and RMSNorm of the model, including "
        "those of heads, queries and keys",
        least=1e-12,
    )
    positions: str = key(
        "learned",
        "position encoding. rope rotates the pairs of features (i, i + H/2), "
        "rope_interleaved the pairs (2i, 2i + 1)",
        ("none", "learned", "sinusoidal", "rope", "rope_interleaved", "alibi"),
    )
    rope_base: float = key(
        10000.0, "the longest wavelength of RoPE is 2π·rope_base", least=1
    )
    rope_share: float = key(
        1.0, "share of a head's features that RoPE rotates", least=0
    )
    rope_scaling: RopeScaling = RopeScaling()
    length: int = key(300, "tokens of context in training", least=1)
    bias: bool = key(True, "biases in the linear layers and in LayerNorm")
    dropout: float = key(
        0.0, "dropout rate after embedding, attention and feed-forward", least=0
    )
    tie_embeddings: bool = key(False, "use the embedding table as the output layer")
    embedding_scale: float = key(
        0.02, "standard deviation of new embeddings and learned positions", least=0
    )
    dtype: str = key(
        "float32",
        "dtype of the computation; parameters stay float32",
        ("float32", "bfloat16"),
    )
    remat: str = key(
        "none",
        "recomputation in the backward pass, which saves memory. none; dots: all but "
        "most products with weights; feedforward: one product of the feed-forward; "
        "full: whole blocks",
        ("none", "dots", "feedforward", "full"),
    )
    scan_layers: bool = key(
        False, "run the blocks as one loop: compile time does not grow with depth"
    )
    ponder: float = key(
        0.001,
        "weight of the ponder cost in the loss of a universal model; the cost is a "
        "mean over all tokens of a batch",
        least=0,
    )
    pattern: tuple[str, ...] = key(
        (),
        "mechanisms of the blocks, repeated over depth (performer,softmax); empty: "
        "attention.mechanism in all blocks",
        mechanisms,
    )
    attention: Attention = Attention()


@dataclass(frozen=True, repr=False)
class Data(Keys):
    """Keys of the training data."""

    source: str = key(
        "stdlib",
        "source of examples. stdlib: Python's own standard library; text: files; hub: "
        "a Hugging Face data set; packages: files of that library, labelled "
        "by package; digits: images of scikit-learn; the others are generated tasks",
        (
            *("stdlib", "text", "hub", "packages", "digits"),
            *("mqar", "needle", "copy", "reverse", "sort", "swap", "sets", "listops"),
        ),
    )
    path: str = key("", "source=text: a file, a folder, a glob, or several")
    name: str = key(
        "", "source=hub: owner/name, or a local folder of parquet, json or text files"
    )
    mixture: str = key(
        "",
        "source=text or hub: several sources with their shares of the training rows "
        "(PATH:0.7,PATH:0.3 or NAME:0.7,NAME:0.3)",
    )
    subset: str = key("", "source=hub: name of the subset, if the data set has several")
    column: str = key("text", "source=hub: the column that holds the text, or images")
    label: str = key(
        "", "source=hub: the column that holds the labels, if there is one"
    )
    tokenizer: str = key(
        "byte",
        "tokenizer: byte, char, bpe (subwords learned from the training text), or the "
        "path of a Hugging Face tokenizer.json",
    )
    vocabulary: int = key(
        32000, "tokenizer=bpe: largest number of tokens", least=257, most=2**20
    )
    documents: str = key(
        "auto",
        "documents in a row of a decoder. joined: they see each other; separate: they "
        "do not; auto: separate if the text has several documents",
        ("auto", "separate", "joined"),
    )
    bos: str = key(
        "auto",
        "whether documents and prompts begin with the BOS token of the tokenizer.json; "
        "auto: as the file says",
        ("auto", "true", "false"),
    )
    streaming: bool = key(
        False, "source=hub: train while the data set is being read and packed"
    )
    tokens: int = key(
        0, "data.streaming: largest number of training tokens", least=0, most=2**50
    )
    cache: str = key(
        "",
        "folder of packed corpora, which runs share; empty: symjax/data in the user's "
        "cache",
    )
    items: int = key(
        8,
        "generated tasks: number of pairs (mqar), needles (needle) or symbols (copy, "
        "reverse, sort, swap)",
        least=1,
    )
    symbols: int = key(
        64,
        "generated tasks except listops: number of different symbols",
        least=2,
        most=2**16,
    )
    asked: int = key(2, "needle: number of needles that are asked for", least=1)


@dataclass(frozen=True, repr=False)
class Optimizer(Keys):
    """Keys of the optimizer and its schedule."""

    name: str = key(
        "adamw",
        "optax optimizer; muon updates the kernels of blocks, and adamw all other "
        "weights",
        ("adamw", "adam", "lion", "sgd", "muon"),
    )
    learning_rate: float = key(3e-4, "peak learning rate", least=0)
    schedule: str = key(
        "warmup_cosine_decay_schedule",
        "optax schedule; or wsd: warm-up, stable, decay, which can be extended later",
        (
            "constant_schedule",
            "cosine_decay_schedule",
            "linear_schedule",
            "warmup_constant_schedule",
            "warmup_cosine_decay_schedule",
            "wsd",
        ),
    )
    warmup: float = key(
        0.05,
        "steps of the linear warm-up of wsd and the warmup_ schedules; its last step "
        "has the peak; below 1: a share of decay_steps (not for wsd)",
        least=0,
    )
    cooldown: float = key(
        0.2,
        "wsd: steps of the decay, which ends at decay_steps; below 1: a share of it",
        least=0,
    )
    final: float = key(0.1, "learning rate at the end, as a share of the peak", least=0)
    decay_steps: int = key(
        0,
        "step at which the learning rate reaches its end and stays; 0: the last step "
        "of the run",
        least=0,
    )
    weight_decay: float = key(
        0.1, "weight decay of matrices; norms, biases and λ never decay", least=0
    )
    embedding_learning_rate: float = key(
        1.0,
        "factor of learning_rate for the embeddings of tokens, positions and patches "
        "and for the output layer",
        least=0,
    )
    embedding_weight_decay: float = key(
        -1.0,
        "weight decay of the same weights; -1: that of weight_decay",
        least=-1,
    )
    betas: tuple[float, float] = key(
        (0.9, 0.95),
        "decay of the two moments; sgd takes the first as its momentum; with muon they "
        "are those of adamw, and the momentum of muon is 0.95",
    )
    eps: float = key(
        1e-8, "added to the root of the second moment (not by lion and sgd)"
    )
    clip: float = key(
        1.0, "largest norm of the gradient of all weights; 0: off", least=0
    )
    nonfinite: str = key(
        "stop",
        "response to a gradient that is not finite, or a spike. stop: end the run; "
        "skip: count the step and leave the weights as they are",
        ("stop", "skip"),
    )
    spike: float = key(
        0.0,
        "a gradient is a spike if its norm is above this many times the mean of the "
        "last steps; 0: off",
        least=0,
    )
    z_loss: float = key(
        0.0, "weight of the mean of (log Σ exp(logit))² in the loss", least=0
    )
    ema: float = key(
        0.0,
        "decay of an exponential moving average of the weights (eval.py --ema); 0: no "
        "average",
        least=0,
    )
    accumulate: int = key(1, "micro-batches per step; must divide batch_size", least=1)
    version: int = key(
        2,
        "rules of the optimizer. 1: those of runs that began before this key existed: "
        "warm-up begins at a rate of 0, ema begins with the first weights, and muon "
        "updates convolutions as matrices; 2: the present rules",
        least=1,
        most=2,
    )


@dataclass(frozen=True, repr=False)
class Mesh(Keys):
    """Keys of the device mesh: the number of devices on each axis."""

    data: int = key(-1, "devices that split the batch; -1: all that are left")
    fsdp: int = key(1, "devices that split batch, weights and optimizer")
    tensor: int = key(1, "devices that split heads and hidden features")
    sequence: int = key(1, "devices that split the tokens of a row")


@dataclass(frozen=True, repr=False)
class Evaluate(Keys):
    """Keys of the held-out evaluations during training."""

    every: int = key(
        500,
        "steps between held-out evaluations, and samples if evaluate.sample; 0: only "
        "at the end",
        least=0,
    )
    batches: int = key(20, "held-out batches per evaluation; 0: all", least=0)
    sample: bool = key(
        True, "write a sample at each evaluation, if the model can continue text"
    )


@dataclass(frozen=True, repr=False)
class Checkpoint(Keys):
    """Keys of the checkpoints."""

    every: int = key(
        500,
        "steps between checkpoints; 0: only the last step, which is always saved",
        least=0,
    )
    keep: int = key(2, "number of checkpoints to keep", least=1)
    best: bool = key(
        False, "also keep the checkpoint of the lowest held-out loss: eval.py --best"
    )


@dataclass(frozen=True, repr=False)
class Log(Keys):
    """Keys of metrics, boards and profiles."""

    every: int = key(20, "steps between lines of metrics.jsonl", least=1)
    attention: bool = key(
        True,
        "at every evaluation also write, by layer, the entropy of attention maps, the "
        "largest logit and the norm of the gradient",
    )
    tensorboard: bool = key(False, "also write TensorBoard event files")
    wandb: str = key("", "also log to this project of Weights & Biases; empty: do not")
    name: str = key("", "name of the run in log.wandb; empty: that of its workdir")
    profile: str = key(
        "",
        "first and last step of a trace for XProf or TensorBoard (10:15), written to "
        "profile/ in the workdir",
    )


@dataclass(frozen=True, repr=False)
class Transfer(Keys):
    """Keys of attention transfer: the first steps of a run with init_from."""

    match: str = key(
        "none",
        "train only the weights that init_from lacks (feature maps, gates), until each "
        "layer does as that of init_from on the same input. maps: by the cross-entropy "
        "of attention maps; outputs: by the squared error of the outputs of the layer",
        ("none", "maps", "outputs"),
    )
    steps: int = key(
        0,
        "steps of the transfer, the first of the run; the schedule of the optimizer "
        "begins after them",
        least=0,
    )
    learning_rate: float = key(
        1e-2, "learning rate of these steps, which is constant", least=0
    )


@dataclass(frozen=True, repr=False)
class Config(Keys):
    """All keys of a run."""

    steps: int = key(3000, "optimizer steps of the run", least=1)
    batch_size: int = key(32, "rows per step, over all devices", least=1)
    seed: int = key(0, "seed of weights, shuffling and dropout", least=0)
    init_from: str = key(
        "",
        "workdir, or folder with a Llama, a DiffLlama or a GPT-2, whose weights are "
        "converted to this model before the first step",
    )
    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    mesh: Mesh = Mesh()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    transfer: Transfer = Transfer()


def scheduled_steps(options: Config) -> int:
    """Return the steps after attention transfer, for the schedule of the optimizer."""
    return options.steps - options.transfer.steps


def is_causal(model: Model) -> bool:
    """Return whether a token sees only itself and the tokens before it."""
    return model.kind != "encoder"


def mechanism_of(model: Model, depth: int) -> str:
    """Return the mechanism of the block at `depth`, counted from 0."""
    if model.pattern:
        return model.pattern[depth % len(model.pattern)]
    return model.attention.mechanism


def mechanisms_of(model: Model) -> tuple[str, ...]:
    """Return the mechanisms of a model: its pattern, or the one of all blocks."""
    return model.pattern or (model.attention.mechanism,)


def attention_of(model: Model) -> str:
    """Return the attention of a model in words.

    For instance: softmax, symmetric plain, differential v1.
    """
    chosen = model.attention
    words = [" and ".join(dict.fromkeys(mechanisms_of(model)))]
    for name in ("symmetric", "differential"):
        if (value := getattr(chosen, name)) != "none":
            words.append(f"{name} {value}")
    if chosen.signals > 1:
        words[-1] += f" with {chosen.signals} signals"
    return ", ".join(words)


def declared_options(model: Model) -> dict[str, Any]:
    """Return the options that the mechanisms of a model declare, by name.

    Each is an `attention.Option`.

    Raises:
        ValueError: two mechanisms declare one name differently.
    """
    from symjax.attention import MECHANISMS

    found: dict[str, Any] = {}
    for mechanism in mechanisms_of(model):
        for name, option in MECHANISMS[mechanism].declared.items():
            if found.setdefault(name, option) != option:
                raise ValueError(
                    f"model.attention.options.{name} is declared in two ways by the "
                    f"mechanisms {', '.join(model.pattern)}: rename it in one"
                )
    return found


def own_options(model: Model) -> OwnOptions:
    """Return the values of `declared_options`: those of the model, or the defaults.

    Raises:
        ValueError: a value is wrong, or no mechanism of the model has the option.
    """
    known, given = declared_options(model), model.attention.options
    for name, value in given.items():
        if name not in known:
            mechanisms = ", ".join(mechanisms_of(model))
            raise ValueError(
                f"model.attention.options.{name} {value!r}: {mechanisms} has no such "
                "option"
            )
    return OwnOptions(
        {
            name: option.checked(
                f"model.attention.options.{name}", given.get(name, option.default)
            )
            for name, option in known.items()
        }
    )
