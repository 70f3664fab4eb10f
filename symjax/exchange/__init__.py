"""Trained models, loaded for use, and folders of weights for other libraries."""

from symjax.exchange.loaded import Loaded, TextLoss, load
from symjax.exchange.pretrained import load_pretrained, save_pretrained

__all__ = ["Loaded", "TextLoss", "load", "load_pretrained", "save_pretrained"]
