"""Attention mechanisms as pure functions of arrays.

The mechanisms are in the files of this folder, and `mechanisms.py` has their table.
Score mechanisms compute a score for each pair of tokens; their engine is in `scores/`.
Recurrences keep a state of the past; their engine is in `recurrent/`. `kernels/` has
kernels for TPUs and GPUs, and `core/` the code that all of these share.

scores                 softmax, sparse, softpick, differential, symmetric, gau
recurrences            linear, performer, cosine, gated_linear, delta_rule, mesa_layer,
                       flash, causal_matrix_function
functions of QQᵀ       matrix_function, without a causal mask
feature maps           features, random_features, favor, slay
positions              positions, rope_scaling

Shapes use the alphabet of `jax.nn.dot_product_attention`: B batch, T query length,
S key length, N heads, K key/value heads, H head size, V value size, M features.
"""

from symjax.attention.causal_matrix_function import (
    matrix_function_causal,
    matrix_function_state,
    matrix_function_step,
)
from symjax.attention.core.options import Option
from symjax.attention.cosine import (
    cosine,
    cosine_causal,
    cosine_state,
    cosine_step,
)
from symjax.attention.delta_rule import delta_causal, delta_state, delta_step
from symjax.attention.differential import (
    differential,
    differential_lambda,
    differential_v2,
    lambda_initial,
)
from symjax.attention.favor import Statistics, favor_statistics
from symjax.attention.features import hedgehog, t2r
from symjax.attention.flash import (
    flash,
    flash_causal,
    flash_state,
    flash_step,
)
from symjax.attention.gated_linear import (
    decay_causal,
    decay_state,
    decay_step,
    gated_log_decay,
    lightning_log_decay,
    retention_log_decay,
)
from symjax.attention.gau import gau
from symjax.attention.linear import (
    linear,
    linear_causal,
    linear_state,
    linear_step,
)
from symjax.attention.matrix_function import matrix_function
from symjax.attention.mechanisms import (
    MECHANISMS,
    TABLES,
    Mechanism,
    table,
)
from symjax.attention.mesa_layer import mesa_causal, mesa_state, mesa_step
from symjax.attention.performer import (
    performer,
    performer_causal,
    performer_state,
    performer_step,
)
from symjax.attention.positions import (
    alibi_bias,
    alibi_slopes,
    position_bias,
    rotate,
    sinusoidal,
)
from symjax.attention.random_features import orthogonal_projection
from symjax.attention.rope_scaling import rope_attention_factor, rope_frequencies
from symjax.attention.scores.mechanism import ScoreMechanism
from symjax.attention.softmax import softmax
from symjax.attention.softpick import softpick
from symjax.attention.sparse import entmax15, sparsemax
from symjax.attention.symmetric import symmetric, symmetric_key

__all__ = [
    "MECHANISMS",
    "Mechanism",
    "Option",
    "ScoreMechanism",
    "Statistics",
    "TABLES",
    "alibi_bias",
    "alibi_slopes",
    "cosine",
    "cosine_causal",
    "cosine_state",
    "cosine_step",
    "decay_causal",
    "decay_state",
    "decay_step",
    "delta_causal",
    "delta_state",
    "delta_step",
    "differential",
    "differential_lambda",
    "differential_v2",
    "entmax15",
    "favor_statistics",
    "flash",
    "flash_causal",
    "flash_state",
    "flash_step",
    "gated_log_decay",
    "gau",
    "hedgehog",
    "lambda_initial",
    "lightning_log_decay",
    "linear",
    "linear_causal",
    "linear_state",
    "linear_step",
    "matrix_function",
    "matrix_function_causal",
    "matrix_function_state",
    "matrix_function_step",
    "mesa_causal",
    "mesa_state",
    "mesa_step",
    "orthogonal_projection",
    "performer",
    "performer_causal",
    "performer_state",
    "performer_step",
    "position_bias",
    "retention_log_decay",
    "rope_attention_factor",
    "rope_frequencies",
    "rotate",
    "sinusoidal",
    "softmax",
    "softpick",
    "sparsemax",
    "symmetric",
    "symmetric_key",
    "t2r",
    "table",
]
