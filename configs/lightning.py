"""Decaying linear attention with the slopes of TransNormerLLM (Lightning).

python train.py --config configs/lightning.py:tiny
python train.py --config configs/lightning.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config(size: str = "3l") -> ConfigDict:
    config = base.get_config(size)
    config.model.attention.update(
        mechanism="decay", decay="transnormer", output_gate=True
    )
    return config
