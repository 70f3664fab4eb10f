"""Multi-query associative recall: pairs of key and value, then keys alone.

    python train.py --config configs/mqar.py
    python eval.py --workdir runs/mqar --tasks loss,mqar

Eight pairs of 32 keys and 32 values in rows of 48 tokens; another mechanism by
--config.model.attention.mechanism=NAME. Chance is 3.47 nats an answer.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "tiny") -> ConfigDict:
    config = base.get_config(size)
    config.data.update(source="mqar", items=8, symbols=32)
    config.optimizer.learning_rate = 2e-3
    if size == "tiny":
        config.model.update(width=64, heads=2, length=48)
        config.update(batch_size=32, steps=2000)
    return config
