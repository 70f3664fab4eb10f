"""SSMax: the log-n law of `log_n.py`, times a learned factor per head.

    python train.py --config configs/ssmax.py:tiny
    python train.py --config configs/ssmax.py

Expected: a held-out loss of 2.027 nats/byte after 300 steps of `:tiny`. The law
without a learned factor (`log_n.py`) reaches 2.052, and softmax 2.019.

Measured with --config.steps=300 --config.evaluate.every=0
--config.data.documents=joined on two CPU cores, on all held-out text of the standard
library of Python 3.11. The 3000 steps of `:tiny` and the larger sizes were not
measured.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.with_remat(size)
    config.model.attention.update(length_base=512, length_scale="learned")
    return config
