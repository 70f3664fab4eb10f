"""What a layer has because of its depth: read from one layer, given to another.

Such a number is a plain attribute, a constant of the compiled program. A scan over
layers has one program for all of them and takes these numbers as inputs. A module names
them in `BY_DEPTH`.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

Values = dict[str, Array]  # path of the attribute inside the block → its value


def of_depth(block: nnx.Module) -> Values:
    """Every number that the block and the modules in it have because of their depth."""
    return {
        "/".join(map(str, (*path, name))): jnp.asarray(getattr(module, name))
        for path, module in nnx.iter_modules(block)
        for name in getattr(module, "BY_DEPTH", ())
    }


def give(block: Any, values: Values | dict[str, None]) -> None:
    """Put the values where `of_depth` found them."""
    for path, value in values.items():
        *modules, name = path.split("/")
        module = block
        for step in modules:
            module = getattr(module, step)
        setattr(module, name, value if value is None else nnx.data(value))
