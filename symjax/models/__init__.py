"""Whole models."""

from symjax.models.decoder import Decoder

__all__ = ["Decoder"]
