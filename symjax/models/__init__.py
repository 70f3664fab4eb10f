"""Whole models, what they cost, and how they write."""

from symjax.models.decoder import Decoder
from symjax.models.generate import generate

__all__ = ["Decoder", "generate"]
