"""What the backward pass keeps of a block, and what it computes again."""

from collections.abc import Callable

import jax
from flax import nnx

# By the values of model.remat. Products of weights and tokens have no batch dimension,
# since layers see flat tokens; those of attention have, and grow with the context.
POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def rematerialised(run: Callable, choice: str, *, in_scan: bool = False) -> Callable:
    """`run`, of modules or arrays, so that its backward pass keeps less.

    Args:
        choice: "none" keeps everything, "dots" the input and the products with weights,
            "full" the input alone.
        in_scan: the loop itself keeps the compiler from merging both computations.
    """
    if choice == "none":
        return run
    return nnx.remat(run, policy=POLICIES[choice], prevent_cse=not in_scan)
