"""Keys of a run: their names, defaults and meanings, written here and nowhere else.

A configuration file (`configs/NAME.py`) changes some keys. The command line changes
more (`--config.model.depth=6`). A checkpoint stores all of them, and `train.py --help`
prints their meanings. This package is plain data: importing it imports neither jax nor
flax.

In the order of reading:

keys.py       `key` declares a key, and `Keys` is a group of keys
run.py        `Config`, all keys of a run, and its small groups, such as `Mesh`
model.py      `Model` and `RopeScaling`
attention.py  `Attention`, the keys of the attention layer
data.py       `Data`, the keys of the training data
optimizer.py  `Optimizer`, with the schedule
derived.py    values that follow from the keys, such as the mechanism of a block
declared.py   options that mechanisms declare themselves
"""

from symjax.config.attention import Attention
from symjax.config.data import Data
from symjax.config.declared import declared_options, own_options
from symjax.config.derived import (
    attention_of,
    is_causal,
    mechanism_of,
    mechanisms_of,
    scheduled_steps,
)
from symjax.config.keys import LARGEST, OwnOptions
from symjax.config.model import Model, RopeScaling
from symjax.config.optimizer import Optimizer
from symjax.config.run import Checkpoint, Config, Evaluate, Log, Mesh, Transfer

__all__ = [
    "LARGEST",
    "Attention",
    "Checkpoint",
    "Config",
    "Data",
    "Evaluate",
    "Log",
    "Mesh",
    "Model",
    "Optimizer",
    "OwnOptions",
    "RopeScaling",
    "Transfer",
    "attention_of",
    "declared_options",
    "is_causal",
    "mechanism_of",
    "mechanisms_of",
    "own_options",
    "scheduled_steps",
]
