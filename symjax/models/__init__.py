"""Whole models: build them, write text with them, convert and measure them.

build.py         build: config.Model → Decoder or Encoder; their arrays as nested dicts
decoder.py       Decoder: logits of the next token, over whole rows or with a cache
encoder.py       Encoder: tokens also see later ones; classes or masked tokens
transformer.py   embedding, positions, blocks and output layer of all models
scanned.py       all blocks as one `jax.lax.scan` (model.scan_layers)
generate.py      generate: sampled continuations of prompts
convert.py       convert: weights of one model for a model with another mechanism
statistics.py    fit_statistics: constants of FAVOR++ and FAVOR#
attention_maps.py  attention maps and scores, their statistics by layer
lambdas.py       λ of differential layers
cost.py chips.py floating-point operations by formula; speeds of accelerators
huggingface/     weights from and for models of Hugging Face and of unilm
"""

from symjax.models.build import build
from symjax.models.convert import convert
from symjax.models.decoder import Decoder
from symjax.models.encoder import Encoder
from symjax.models.generate import generate
from symjax.models.huggingface.folders import load_diffllama
from symjax.models.huggingface.weights import (
    diffllama_attention,
    official_attention,
    to_diffllama,
    to_official,
)
from symjax.models.statistics import fit_statistics

__all__ = [
    "Decoder",
    "Encoder",
    "build",
    "convert",
    "diffllama_attention",
    "fit_statistics",
    "generate",
    "load_diffllama",
    "official_attention",
    "to_diffllama",
    "to_official",
]
