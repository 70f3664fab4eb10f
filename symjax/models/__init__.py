"""Whole models, what they cost, and how they write."""

from symjax.models.build import build
from symjax.models.convert import convert
from symjax.models.decoder import Decoder
from symjax.models.encoder import Encoder
from symjax.models.exchange import (
    diffllama_attention,
    load_diffllama,
    official_attention,
    to_diffllama,
    to_official,
)
from symjax.models.generate import generate

__all__ = [
    "Decoder",
    "Encoder",
    "build",
    "convert",
    "diffllama_attention",
    "generate",
    "load_diffllama",
    "official_attention",
    "to_diffllama",
    "to_official",
]
