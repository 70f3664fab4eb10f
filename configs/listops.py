"""ListOps: predict the value of nested lists of digits: [MAX 2 9 [MIN 4 7] 0].

    python train.py --config configs/listops.py
    python eval.py --workdir runs/listops --tasks loss,listops

Rows have 32 tokens, and lists are nested up to four deep. Guessing costs 2.30 nats.

Expected with softmax: a held-out loss of 1.22 nats after 1000 steps, and 79, 58, 52
and 47 % right at nesting depths 1 to 4. Always giving the most frequent answer is right
in 13 % of the rows, and the most frequent answer of the outermost operator in 24 %.
Measured on a 2-core CPU VM.
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
