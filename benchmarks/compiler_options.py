"""Time of a training step with and without the compiler options that symjax sets.

    python benchmarks/compiler_options.py [rounds] [gpt:3l diff:tiny …]

The tokens are random. Columns: milliseconds of a step without options, and this time
divided by the time with `symjax.training.sharding.compiler_options`. Above 1 the
options help.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from unittest import mock

import jax
import numpy as np
from turns import in_turn, milliseconds, ratio

sys.path.insert(0, str(Path(__file__).parent.parent))  # configs are not installed

from symjax import validation
from symjax.config import Config
from symjax.training import sharding
from symjax.training.step import build_program

VOCABULARY = 256
MODELS = "gpt:3l", "diff:3l", "performer:3l", "gpt:tiny", "delta:tiny"


def options_of(name: str, size: str) -> Config:
    """Return the configuration of a file of configs/ with a vocabulary of bytes."""
    tree = import_module(f"configs.{name}").get_config(size)
    tree.model.vocabulary = VOCABULARY
    return validation.from_dict(tree.to_dict())


def text_for(options: Config) -> np.ndarray:
    """Return random tokens [B T+1] for one batch."""
    shape = options.batch_size, options.model.length + 1
    return np.random.default_rng(0).integers(0, VOCABULARY, shape)


def training_step(options: Config, text: np.ndarray) -> tuple[Callable, int]:
    """Return a function that runs one step, and the number of parameters."""
    program = build_program(options, sharding.make_mesh(options.mesh))
    rows = program.place(
        (options.batch_size, options.model.length),
        lambda i, j: tuple(
            x[i:j].astype(np.int32) for x in (text[:, :-1], text[:, 1:])
        ),
    )
    state, constants = program.initial(0)
    count = sum(x.size for x in jax.tree.leaves(state.params))

    def step():
        nonlocal state
        with jax.set_mesh(program.mesh):
            state, metrics = program.train(state, constants, *rows, jax.random.key(0))
        return jax.block_until_ready((state, metrics))

    return step, count


def main(rounds: str = "7", *models: str) -> None:
    print(f"jax {jax.__version__}\n{'':14}{'ms without':>12}{'without/with':>14}")
    for model in models or MODELS:
        options = options_of(*model.split(":"))
        text = text_for(options)
        with mock.patch.object(sharding, "compiler_options", return_value={}):
            without, _ = training_step(options, text)
            without()  # compiles while the options are patched away
        rivals = {"without": without, "with": training_step(options, text)[0]}
        times = in_turn(rivals, int(rounds))
        print(f"{model:14}{milliseconds(times, 'without'):12.0f}", end="")
        print(f"{ratio(times, 'without', 'with'):14.2f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
