"""Multi-query associative recall: after pairs of keys and values, recall the values.

    python train.py --config configs/mqar.py
    python eval.py --workdir runs/mqar --tasks loss,mqar,order

A row of 48 tokens has eight pairs, drawn from 32 keys and 32 values.
--config.model.attention.mechanism=NAME trains another mechanism, and
--config.data.items changes the number of pairs. Guessing costs 3.47 nats per answer.

Expected with softmax: held-out losses of 2.78 nats per answer after 200 steps, 0.007
after 400 and 0.000 after all 1000. Embeddings start as large as the outputs that the
blocks add to them. With model.embedding_scale=0.02 they are too small beside these
outputs, and 2000 steps end at 1.66. Measured on a 2-core CPU VM.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "tiny") -> ConfigDict:
    config = base.get_config(size)
    config.data.update(source="mqar", items=8, symbols=32)
    config.model.update(embedding_scale=1.0, vocabulary=0)
    config.optimizer.learning_rate = 2e-3
    if size == "tiny":
        config.model.update(width=64, heads=2, length=48)
        config.update(batch_size=32, steps=1000)
    return config
