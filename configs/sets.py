"""Sets: name the majority of the independent symbols so far, at every place of a row.

    python train.py --config configs/sets.py
    python eval.py --workdir runs/sets --tasks loss,sets

A row has 64 tokens, drawn from 2 symbols. Guessing costs 0.69 nats per answer.
--config.model.attention.length_base=512 trains log-n scaling.

Expected with softmax: a held-out loss of 0.000 nats per answer and an accuracy of 1.000
after 500 steps and after all 1000. Measured on a 2-core CPU VM.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "tiny") -> ConfigDict:
    config = base.get_config(size)
    config.data.update(source="sets", symbols=2)
    config.model.update(embedding_scale=1.0, vocabulary=0)
    config.optimizer.learning_rate = 2e-3
    if size == "tiny":
        config.model.update(width=64, heads=2, length=64)
        config.update(batch_size=32, steps=1000)
    return config
