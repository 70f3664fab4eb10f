"""Keys of the model."""

from __future__ import annotations

from dataclasses import dataclass

from symjax.config.attention import Attention, mechanisms
from symjax.config.keys import Keys, key


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
        "with halting; encoder: depth blocks in which a token also sees later ones",
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
        "features per head; 0: width/heads. Differential V1: features of the queries "
        "and keys of a branch, while values have twice as many; 0: width/heads/2. gau "
        "and flash: features of queries and keys; 0: width/2, at most 128",
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
        10000.0,
        "RoPE turns pair i of R features by rope_base^(−2i/R) radians per position",
        least=1,
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
        "what the backward pass recomputes to save memory. none: nothing; dots: "
        "everything except most products with weights; feedforward: everything except "
        "one product of the feed-forward; full: whole blocks",
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
