"""Nested lists of digits, [MAX 2 9 [MIN 4 7] 0]: what is the value?

    python train.py --config configs/listops.py
    python eval.py --workdir runs/listops --tasks loss,listops

Rows of 32 tokens, up to four lists inside each other. Measured on a 2-core CPU VM with
softmax: 1.22 nats held out after its 1000 steps (chance 2.30), and 79, 58, 52 and 47 %
right by depth of nesting. The commonest answer is right in 13 %, the commonest of the
outermost operator in 24 %.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "tiny") -> ConfigDict:
    config = base.get_config(size)
    config.data.source = "listops"
    config.model.update(embedding_scale=1.0, vocabulary=0)
    config.optimizer.learning_rate = 2e-3
    if size == "tiny":
        config.model.update(width=64, heads=4, length=32)
        config.update(batch_size=64, steps=1000)
    return config
