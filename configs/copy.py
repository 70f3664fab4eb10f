"""Copying: symbols, a separator, and the same symbols again.

    python train.py --config configs/copy.py
    python eval.py --workdir runs/copy --tasks loss,copy

16 of 32 symbols in rows of 32 tokens. Chance is 3.47 nats an answer. Measured on a
2-core CPU VM with softmax: 0.001 nats held out after 200 steps, 0.000 after its 600.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "tiny") -> ConfigDict:
    config = base.get_config(size)
    config.data.update(source="copy", items=16, symbols=32)
    config.model.update(embedding_scale=1.0, vocabulary=0)
    config.optimizer.learning_rate = 2e-3
    if size == "tiny":
        config.model.update(width=64, heads=2, length=32)
        config.update(batch_size=32, steps=600)
    return config
