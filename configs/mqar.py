"""Multi-query associative recall: pairs of key and value, then keys alone.

    python train.py --config configs/mqar.py
    python eval.py --workdir runs/mqar --tasks loss,mqar,order

Eight pairs of 32 keys and 32 values in rows of 48 tokens; another mechanism by
--config.model.attention.mechanism=NAME, other numbers of pairs by --config.data.items.
Chance is 3.47 nats an answer.

Measured on a 2-core CPU VM with softmax: 2.78 nats held out after 200 steps, 0.007
after 400, 0.000 after its 1000. Embeddings start as large as what the blocks add to
them: with model.embedding_scale=0.02 keys drown in it, and 2000 steps end at 1.66.
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
