"""Trained models, loaded for use, and folders of weights for other libraries.

loaded.py      `Loaded`: a trained model that continues texts
continued.py   continuations of prompts of different lengths, in batches
scores.py      log-likelihoods of texts, in batches
pretrained.py  `save_pretrained` and `load_pretrained`
card.py        the model card of such a folder
"""

from symjax.exchange.loaded import Loaded, TextLoss, load
from symjax.exchange.pretrained import load_pretrained, save_pretrained

__all__ = ["Loaded", "TextLoss", "load", "load_pretrained", "save_pretrained"]
