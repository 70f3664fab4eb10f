"""Whole models, what they cost, and how they write."""

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
