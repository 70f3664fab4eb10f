"""Patch transformer on scikit-learn's digits: 1797 images of 8 × 8, in ten classes.

    python train.py --config configs/digits.py
    python train.py --config configs/digits.py --config.model.attention.mechanism=linear

It needs scikit-learn (pip install scikit-learn). A fifth of each class is held out.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "tiny") -> ConfigDict:
    config = base.get_config(size)
    config.model.update(kind="encoder", classes=10, patch=2, length=16)
    # At the default scale of 0.02, positions are too small beside the patches: 94 % of
    # the held-out digits are right instead of 99 %.
    config.model.update(positions="learned", dropout=0.1, embedding_scale=0.5)
    config.model.update(vocabulary=0, tie_embeddings=False)
    config.data.source = "digits"
    config.optimizer.learning_rate = 2e-3
    if size == "tiny":
        config.model.update(width=64, heads=4)
        config.update(batch_size=64, steps=800)
    return config
