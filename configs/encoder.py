"""Encoder: which package of Python's standard library is a piece of source code from?

    python train.py --config configs/encoder.py
    python train.py --config configs/encoder.py:masked

Eight packages; a fifth of the files of each is held out. Files are cut into pieces of
model.length bytes. The presets `:masked` and `:masked-3l` fill in masked bytes of the
whole library instead, and `--config.init_from` takes the weights of such a run (which
has read the text of most held-out files). Any data set of the hub with labels:

    --config.data.source=hub --config.data.name=fancyzhx/ag_news
    --config.data.label=label --config.model.classes=4

Measured on a 2-core CPU VM with softmax: 33.6 % of the held-out pieces right after 1000
steps (guessing the most frequent package: 19 %), 2.04 nats a piece, and no more from
the weights of `:masked`, whose 1000 steps end at 1.69 nats a masked byte, where a table
of bytes gives 3.20. docs/results.md has the other mechanisms.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "tiny") -> ConfigDict:
    name = size.removeprefix("masked").removeprefix("-") or "tiny"
    config = base.get_config(name)
    config.model.update(kind="encoder", vocabulary=0, tie_embeddings=False)
    if not size.startswith("masked"):
        config.model.classes = 8
        config.data.source = "packages"
    if name == "tiny":
        config.model.update(width=64, dropout=0.1)
        config.update(batch_size=32, steps=1000)
        config.optimizer.learning_rate = 2e-3
    return config
