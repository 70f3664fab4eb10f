"""Keys of the attention layer."""

from __future__ import annotations

from dataclasses import dataclass

from symjax.config.keys import Keys, OwnOptions, key


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
        "keys. none: a separate projection; plain: the queries; pairwise: U·query; kv: "
        "a separate projection, which is also the values; qkv: the queries, which are "
        "also the values",
        ("none", "plain", "pairwise", "kv", "qkv"),
    )
    symmetric_initial: bool = key(
        False,
        "the projection of keys begins as a copy of the projection of queries; needs "
        "symmetric none or kv",
    )
    key_size: int = key(
        0,
        "features of a query or key per head; values keep the size that "
        "model.head_size gives; 0: as many as model.head_size",
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
        "that the row sees, or 16 if it sees fewer; 0: off",
        least=0,
    )
    length_scale: str = key(
        "",
        "another change of the scores with the number n of visible keys. learned: the "
        "factor of length_base times a learned factor per head (SSMax); adaptive: "
        "1 + β (log(n + 1))^γ with β and γ from the token (ASEntmax); floor: 1 + 0.1 "
        "log(1 + ⌊n / 8192⌋) (Llama 4); distance: a factor and a shift by the distance "
        "of a pair (scale-invariant attention); empty: length_base alone",
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
        "forget gate of score mechanisms: adds to a score the sum of the log-decays "
        "between key and query. fox: learned, log sigmoid(W x + b) per head (the "
        "Forgetting Transformer). The other values of model.attention.decay are "
        "possible too, except those per channel (gated and kda)",
        decays,
    )
    sink: bool = key(
        False,
        "one learned logit per head in the denominator of a row of scores; not with "
        "softpick",
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
        "number of sinusoidal features f of a key's position. A score becomes a·score "
        "+ w·f, with a and w learned per head; 0: off",
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
        256,
        "rows of the random projection of a layer, each of which gives one feature, or "
        "two if hyperbolic or trigonometric; or number of t2r's features",
        least=1,
    )
    feature_norms: str = key(
        "chi",
        "row norms of the random projection. chi: those of normal vectors; constant: "
        "√H",
        ("chi", "constant"),
    )
    decay: str = key(
        "retention",
        "log-decay. none; constant per head: retention (RetNet), transnormer and "
        "lightning (two published slopes); learned per channel: gated (GLA) and kda; "
        "learned per head: fox, the gate of the Forgetting Transformer, and mamba2, "
        "which in the decay mechanism also scales values and adds a skip",
        decays,
    )
    decay_heads: int = key(
        0,
        "constant log-decays: number of different rates, which the key/value heads "
        "repeat; 0: one rate for each key/value head",
        least=0,
    )
    delta_gates: str = key(
        "head",
        "gates of the delta rule. head: one β per head, the share that is erased and "
        "written; channel: erase gates per channel of the keys and write gates per "
        "channel of the values (Gated DeltaNet-2)",
        ("head", "channel"),
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
        least=1e-9,
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
        former={
            **dict.fromkeys((True, "true", "True"), "silu"),
            **dict.fromkeys((False, "false", "False"), "none"),
        },
    )
    short_convolution: int = key(
        0,
        "width in tokens of a causal convolution over queries, keys and values; 0: off",
        least=0,
    )
    chunk_size: int = key(
        64,
        "tokens in a chunk of a causal recurrence; another size changes results by "
        "rounding only. flash: tokens in a group, which change the result",
        least=1,
    )
    implementation: str = key(
        "auto",
        "what computes attention in training and evaluation. auto: the first kernel "
        "that supports the call, else rows. rows: blocks of rows in XLA. whole: one "
        "map of all pairs. tpu, cudnn, gpu_differential: this kernel of softmax. ring: "
        "softmax over mesh.sequence, which passes keys and values between devices "
        "instead of gathering them. jla: decay and delta by the kernels of "
        "jax-linear-attention for Hopper GPUs. Decoding is always auto. fused and "
        "hopper are former names of tpu and gpu_differential",
        (
            *("auto", "rows", "whole", "tpu", "gpu_differential", "cudnn", "ring"),
            *("jla", "fused", "hopper"),
        ),
    )
    options: OwnOptions = key(
        OwnOptions(), "options that the mechanism declares itself, by name"
    )
