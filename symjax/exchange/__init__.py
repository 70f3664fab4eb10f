"""Trained models in and out: loaded for use, and as folders that others read."""

from symjax.exchange.loaded import Loaded, TextLoss, load
from symjax.exchange.pretrained import load_pretrained, save_pretrained

__all__ = ["Loaded", "TextLoss", "load", "load_pretrained", "save_pretrained"]
