"""Needles in a hay: keys and values after a mark, asked for at the end.

    python train.py --config configs/needle.py
    python eval.py --workdir runs/needle --tasks loss,needle,noise,order

Six needles of 32 keys and 32 values in rows of 48 tokens, all asked, for that is where
the model learns most from a row; `eval.py` asks as many of as many as the paper does
(arXiv 2410.05258). Chance is 3.47 nats an answer.

Measured on a 2-core CPU VM with softmax: 2.58 nats held out after 400 steps, 0.013
after 800, 0.000 after 1000 of its 2000; then of 1, 2, 4 or 6 needles 1 or 2 asked: at
least 99.7 % right. 1000 steps at a learning rate of 3e-3 ended at 1.90 nats.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "tiny") -> ConfigDict:
    config = base.get_config(size)
    config.data.update(source="needle", items=6, asked=6, symbols=32)
    config.model.update(embedding_scale=1.0, vocabulary=0)
    config.optimizer.learning_rate = 1e-3
    if size == "tiny":
        config.model.update(width=64, heads=2, length=48)
        config.update(batch_size=32, steps=2000)
    return config
