"""The keys of a run: names, defaults, meanings. The only place where they are written.

A configuration file (`configs/NAME.py`) changes some of them, a command line some more
(`--config.model.depth=6`), a checkpoint stores them all, and `train.py --help` prints
this file. Everything here is plain data: no jax, no flax.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LARGEST = 2**31 - 1  # of any number, so that 32 bits hold it


def key(
    default: Any,
    meaning: str,
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] = (),
    *,
    least: float = -math.inf,
    most: float = LARGEST,
) -> Any:
    """One key: its default, its meaning, and the values it may take."""
    return dataclasses.field(
        default=default,
        metadata={"meaning": meaning, "choices": choices, "least": least, "most": most},
    )


class OwnOptions(dict[str, Any]):
    """Options that mechanisms declare, by name; hashable, since layers hold them."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self.items()))


class Keys:
    """A group of keys. A whole number is a float where a key is one: clip=0."""

    def __repr__(self) -> str:
        """Only the keys that differ from their defaults."""
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


def mechanisms() -> tuple[str, ...]:
    """The names in the table of mechanisms, which knows jax and so is read late."""
    from symjax.attention import MECHANISMS

    return tuple(MECHANISMS)


def feature_maps() -> tuple[str, ...]:
    """The names of feature maps: of the tables, and the learned ones of layers."""
    from symjax.attention import TABLES

    known = [name for table in TABLES["features"] for name in table]
    return ("", *dict.fromkeys(known), "hedgehog", "t2r")


def decays() -> tuple[str, ...]:
    """The names in the table of log-decays."""
    from symjax.attention import TABLES

    return tuple(TABLES["decay"][0])


@dataclass(frozen=True, repr=False)
class Attention(Keys):
    """The attention layer: mechanism, keys, differential maps, execution."""

    mechanism: str = key(
        "softmax",
        "how attention weights are computed",
        mechanisms,
    )
    symmetric: str = key(
        "none",
        "how keys are made: own projection, the query itself, or U·query",
        ("none", "plain", "pairwise"),
    )
    differential: str = key(
        "none",
        "differential attention A₁ − λA₂, with λ of the layer (v1) or of every token "
        "and head (v2)",
        ("none", "v1", "v2"),
    )
    depth_offset: int = key(
        0, "the depth of the first layer in λ_init = 0.8 − 0.6 exp(−0.3 depth)", least=0
    )
    length_base: int = key(
        0,
        "scores times log n / log length_base, n the keys a row sees, at least 16; "
        "0: off",
        least=0,
    )
    window: int = key(
        0,
        "how many tokens one sees: itself and those before it, in an encoder as many "
        "after it; 0: all",
        least=0,
    )
    mask_self: bool = key(False, "hide a token from itself unless it sees nothing else")
    query_key_norm: bool = key(False, "RMSNorm of every query and key head")
    key_norm: str = key(
        "none",
        "normalise symmetric keys: to length 1, or to root mean square 1",
        ("none", "unit", "rms"),
    )
    features: str = key(
        "",
        "feature map of linear and performer; empty: the mechanism's own; hedgehog and "
        "t2r are learned",
        feature_maps,
    )
    feature_count: int = key(
        256, "features a head: random ones, or those of t2r", least=1
    )
    feature_norms: str = key(
        "chi",
        "row norms of random features: as normal vectors, or √H",
        ("chi", "constant"),
    )
    decay: str = key(
        "retention",
        "log-decay: none, constant per head (RetNet, or one of two published Lightning "
        "slopes), or learned: per channel (gated of GLA, kda) or per head (mamba2, "
        "which of the decay mechanism also scales values and adds a skip)",
        decays,
    )
    decay_heads: int = key(
        0,
        "of constant log-decays: heads with rates of their own, which the key/value "
        "heads repeat; 0: all key/value heads",
        least=0,
    )
    function: str = key(
        "exp",
        "of matrix_function: which function of A = QQᵀ replaces the attention map",
        ("exp", "expm1", "resolvent", "resolventm1"),
    )
    function_scale: float = key(
        1.0, "of matrix_function: times A, a mean of softmax's scores", least=0
    )
    output_gate: bool = key(
        False, "multiply the output by silu(W x), as RetNet and GLA do"
    )
    short_convolution: int = key(
        0,
        "tokens that a causal convolution over queries, keys and values sees; 0: off",
        least=0,
    )
    chunk_size: int = key(
        64,
        "tokens a chunk of the causal prefix sum, which change rounding alone; of "
        "flash, the tokens of a group, which change the result",
        least=1,
    )
    implementation: str = key(
        "auto",
        "how score mechanisms run over whole rows. auto: softmax by the fused kernel "
        "on a TPU, by cuDNN on an NVIDIA GPU, or its two maps on a Hopper GPU by "
        "hopper, where these serve, all else by blocks of rows. Or forced: rows, the "
        "whole map, fused, hopper, cudnn, or softmax over "
        "mesh.sequence by a ring, in which keys travel and are not gathered. Decoding "
        "is always auto",
        ("auto", "rows", "whole", "fused", "hopper", "cudnn", "ring"),
    )
    options: OwnOptions = key(
        OwnOptions(), "options that the mechanism declares itself, by name"
    )


@dataclass(frozen=True, repr=False)
class RopeScaling(Keys):
    """Scaling of RoPE for texts longer than those of training; kind=none: none."""

    kind: str = key(
        "none",
        "linear: positions in smaller steps; dynamic: a base that grows with the text; "
        "yarn and llama3: slow pairs of features in smaller steps, fast ones as they "
        "are",
        ("none", "linear", "dynamic", "yarn", "llama3"),
    )
    factor: float = key(1.0, "how many times longer texts become", least=1)
    original_length: int = key(
        0, "of dynamic, yarn and llama3: tokens of context before the scaling", least=0
    )
    low_frequency_factor: float = key(
        1.0,
        "of llama3: pairs with fewer turns in original_length tokens are slow",
        least=0,
    )
    high_frequency_factor: float = key(
        4.0,
        "of llama3: pairs with more turns in original_length tokens are fast",
        least=0,
    )
    beta_fast: float = key(
        32.0, "of yarn: pairs with more turns in original_length tokens are fast"
    )
    beta_slow: float = key(
        1.0, "of yarn: pairs with fewer turns in original_length tokens are slow"
    )
    attention_factor: float = key(
        0.0,
        "of yarn: turned queries and keys are multiplied by it; 0: 0.1 ln factor + 1",
        least=0,
    )
    truncate: bool = key(
        True, "of yarn: the pairs at which slow and fast ones end are whole numbers"
    )


@dataclass(frozen=True, repr=False)
class Model(Keys):
    kind: str = key(
        "decoder",
        "depth blocks, or one block applied depth times with halting (universal); an "
        "encoder's tokens see all others, not only those before them",
        ("decoder", "universal", "encoder"),
    )
    vocabulary: int = key(0, "token types; 0: as many as the tokenizer has", least=0)
    classes: int = key(
        0, "of an encoder: labels to choose from; 0: it fills in masked tokens", least=0
    )
    patch: int = key(
        0,
        "of an encoder: pixels a side of what is one token of an image; 0: text",
        least=0,
    )
    image: tuple[int, int, int] = key(
        (0, 0, 0), "height, width and channels of images; 0: those of the data", least=0
    )
    width: int = key(256, "features of the residual stream", least=1)
    depth: int = key(3, "number of blocks", least=1, most=1000)
    heads: int = key(
        8, "output heads; a differential head has two branches inside", least=1
    )
    kv_heads: int = key(
        0, "key/value heads, a divisor of heads; 0: as many as heads", least=0
    )
    head_size: int = key(
        0,
        "query/key features a head; 0: width/heads, halved for differential V1",
        least=0,
    )
    feedforward: int = key(
        0, "hidden features of the feed-forward; 0: 4·width", least=0
    )
    activation: str = key(
        "relu", "of the feed-forward; swiglu adds a gate", ("relu", "gelu", "swiglu")
    )
    norm: str = key("layernorm", "before each sublayer", ("layernorm", "rmsnorm"))
    norm_eps: float = key(
        1e-5,
        "added to the variance in every LayerNorm and RMSNorm of the model, those of "
        "heads, queries and keys included",
        least=1e-12,
    )
    positions: str = key(
        "learned",
        "position encoding; RoPE turns pairs of features, (i, i + H/2) or "
        "interleaved (2i, 2i + 1)",
        ("none", "learned", "sinusoidal", "rope", "rope_interleaved", "alibi"),
    )
    rope_base: float = key(
        10000.0, "the longest wavelength of RoPE is 2π·rope_base", least=1
    )
    rope_share: float = key(1.0, "share of a head's features that RoPE turns", least=0)
    rope_scaling: RopeScaling = RopeScaling()
    length: int = key(300, "tokens of context in training", least=1)
    bias: bool = key(True, "biases in the linear layers and in LayerNorm")
    dropout: float = key(
        0.0, "share dropped after embedding, attention, feed-forward", least=0
    )
    tie_embeddings: bool = key(False, "use the embedding table as the output layer")
    embedding_scale: float = key(
        0.02, "standard deviation of new embeddings and learned positions", least=0
    )
    dtype: str = key(
        "float32",
        "of the computation; parameters stay float32",
        ("float32", "bfloat16"),
    )
    remat: str = key(
        "none",
        "what the backward pass recomputes to save memory: nothing, all but most "
        "products with weights, all but one of the feed-forward, or whole blocks",
        ("none", "dots", "feedforward", "full"),
    )
    scan_layers: bool = key(
        False, "run the blocks as one loop: compile time does not grow with depth"
    )
    ponder: float = key(
        0.001,
        "weight of the ponder cost in the loss of a universal model, a mean over all "
        "tokens of a batch",
        least=0,
    )
    pattern: tuple[str, ...] = key(
        (),
        "mechanisms repeated over depth, instead of one for all: performer,softmax",
        mechanisms,
    )
    attention: Attention = Attention()


@dataclass(frozen=True, repr=False)
class Data(Keys):
    source: str = key(
        "stdlib",
        "where text comes from: Python's own standard library, files, or a data set of "
        "the Hugging Face hub; labelled files of packages of that library, or digits "
        "of scikit-learn; or a generated task",
        (
            *("stdlib", "text", "hub", "packages", "digits"),
            *("mqar", "needle", "copy", "listops"),
        ),
    )
    path: str = key("", "source=text: a file, a folder, a glob, or several")
    name: str = key(
        "", "source=hub: owner/name, or a local folder of parquet, json or text files"
    )
    mixture: str = key(
        "",
        "source=text or hub: several, with their shares of the training rows: "
        "PATH:0.7,PATH:0.3 or NAME:0.7,NAME:0.3",
    )
    subset: str = key("", "source=hub: which part, where a data set has several")
    column: str = key("text", "source=hub: the column that holds the text, or images")
    label: str = key(
        "", "source=hub: the column that holds the labels, if there is one"
    )
    tokenizer: str = key(
        "byte",
        "what a token is: byte, char, bpe (subwords learned from the training text), "
        "or the path of a Hugging Face tokenizer.json",
    )
    vocabulary: int = key(
        32000, "tokenizer=bpe: tokens to learn, at most", least=257, most=2**20
    )
    documents: str = key(
        "auto",
        "of a decoder's text: joined, or separate (unseen by each other); auto: "
        "separate if there are several",
        ("auto", "separate", "joined"),
    )
    bos: str = key(
        "auto",
        "of a tokenizer.json: whether documents and prompts begin with its BOS token; "
        "auto: as the file says",
        ("auto", "true", "false"),
    )
    streaming: bool = key(
        False, "source=hub: train while the data set is being read and packed"
    )
    tokens: int = key(
        0, "of data.streaming: training tokens to pack, at most", least=0, most=2**50
    )
    cache: str = key(
        "",
        "the folder of packed corpora, which runs share; empty: symjax/data of the "
        "user's cache",
    )
    items: int = key(
        8, "of generated tasks: pairs of mqar, needles, symbols to copy", least=1
    )
    symbols: int = key(
        64, "of mqar, needle and copy: different symbols", least=2, most=2**16
    )
    asked: int = key(2, "needles asked, of data.items", least=1)


@dataclass(frozen=True, repr=False)
class Optimizer(Keys):
    name: str = key(
        "adamw",
        "optax optimizer; muon moves what is no matrix of a block as adamw does",
        ("adamw", "adam", "lion", "sgd", "muon"),
    )
    learning_rate: float = key(3e-4, "the peak of the schedule", least=0)
    schedule: str = key(
        "warmup_cosine_decay_schedule",
        "optax schedule; or wsd: warm-up, stable, decay, whose steps can be extended",
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
        "linear warm-up of wsd and the warmup_ schedules, the last step of which has "
        "the peak: steps, or below 1 a share of decay_steps (not for wsd)",
        least=0,
    )
    cooldown: float = key(
        0.2,
        "of wsd: the steps that decay, which end at decay_steps; below 1 a share of it",
        least=0,
    )
    final: float = key(0.1, "learning rate at the end, as a share of the peak", least=0)
    decay_steps: int = key(
        0,
        "the step that has the rate at the end, and from which on it stays; 0: the "
        "run's last",
        least=0,
    )
    weight_decay: float = key(
        0.1, "of matrices; norms, biases and λ never decay", least=0
    )
    embedding_learning_rate: float = key(
        1.0,
        "of embeddings of tokens, positions and patches and of the output layer: times "
        "learning_rate",
        least=0,
    )
    embedding_weight_decay: float = key(
        -1.0, "of the same weights; 0: none, -1: as weight_decay", least=-1
    )
    betas: tuple[float, float] = key(
        (0.9, 0.95),
        "decay of the two moments; sgd takes the first as its momentum and has no "
        "other; of muon those of what adamw moves: its own momentum is 0.95",
    )
    eps: float = key(
        1e-8, "added to the root of the second moment; lion and sgd have none"
    )
    clip: float = key(1.0, "largest norm of the whole gradient; 0: off", least=0)
    nonfinite: str = key(
        "stop",
        "what a step does whose gradient is not finite, or a spike: end the run, or "
        "change nothing and be counted",
        ("stop", "skip"),
    )
    spike: float = key(
        0.0,
        "a gradient is a spike if its norm is above this many times the mean of the "
        "last steps; 0: off",
        least=0,
    )
    z_loss: float = key(
        0.0, "weight of the mean of (log Σ exp(logit))² in what is minimised", least=0
    )
    ema: float = key(
        0.0,
        "also keep a mean of the weights after every step, whose share each later step "
        "multiplies by this: eval.py --ema; 0: none",
        least=0,
    )
    accumulate: int = key(1, "micro-batches a step; must divide batch_size", least=1)
    version: int = key(
        2,
        "rules of the optimizer; 1: those of runs that began without this key, which "
        "continue by them: warm-up begins with a rate of 0, ema with the first "
        "weights, and muon moves convolutions as matrices",
        least=1,
        most=2,
    )


@dataclass(frozen=True, repr=False)
class Mesh(Keys):
    data: int = key(-1, "devices that split the batch; -1: what is left")
    fsdp: int = key(1, "devices that split batch, weights and optimizer")
    tensor: int = key(1, "devices that split heads and hidden features")
    sequence: int = key(1, "devices that split the tokens of a row")


@dataclass(frozen=True, repr=False)
class Evaluate(Keys):
    every: int = key(
        500,
        "steps between held-out evaluations, and samples if evaluate.sample; 0: at the "
        "end",
        least=0,
    )
    batches: int = key(20, "held-out batches an evaluation; 0: all", least=0)
    sample: bool = key(
        True, "write a sample at each evaluation, where the model continues text"
    )


@dataclass(frozen=True, repr=False)
class Checkpoint(Keys):
    every: int = key(
        500,
        "steps between checkpoints; 0: only the last step, which is always saved",
        least=0,
    )
    keep: int = key(2, "checkpoints kept", least=1)
    best: bool = key(
        False, "also save and keep the one of the least held-out loss: eval.py --best"
    )


@dataclass(frozen=True, repr=False)
class Log(Keys):
    every: int = key(20, "steps between lines of metrics.jsonl", least=1)
    tensorboard: bool = key(False, "also write TensorBoard event files")
    wandb: str = key("", "also log to this project of Weights & Biases; empty: do not")
    name: str = key("", "of the run in log.wandb; empty: that of its workdir")
    profile: str = key(
        "",
        "the first and the last step of a trace for XProf or TensorBoard, which is "
        "written to profile/ of the workdir: 10:15",
    )


@dataclass(frozen=True, repr=False)
class Config(Keys):
    steps: int = key(3000, "optimizer steps of the run", least=1)
    batch_size: int = key(32, "rows a step, over all devices", least=1)
    seed: int = key(0, "of weights, shuffling and dropout", least=0)
    init_from: str = key(
        "",
        "start from the weights of this workdir, or of a folder with a Llama, a "
        "DiffLlama or a GPT-2, converted to this model",
    )
    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    mesh: Mesh = Mesh()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()


def is_causal(model: Model) -> bool:
    """Whether a token sees only itself and those before it."""
    return model.kind != "encoder"


def mechanism_of(model: Model, depth: int) -> str:
    """The mechanism of the block at `depth`, counted from 0."""
    if model.pattern:
        return model.pattern[depth % len(model.pattern)]
    return model.attention.mechanism


def mechanisms_of(model: Model) -> tuple[str, ...]:
    """The mechanisms of a model: those of its pattern, or the one of all blocks."""
    return model.pattern or (model.attention.mechanism,)


def attention_of(model: Model) -> str:
    """The attention of a model in words: softmax, symmetric plain, differential v1."""
    chosen = model.attention
    words = [" and ".join(dict.fromkeys(mechanisms_of(model)))]
    for name in ("symmetric", "differential"):
        if (value := getattr(chosen, name)) != "none":
            words.append(f"{name} {value}")
    return ", ".join(words)


def declared_options(model: Model) -> dict[str, Any]:
    """The options that the mechanisms of a model declare, by name: `attention.Option`.

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
    """The values of `declared_options`: those of the model, or their defaults.

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
