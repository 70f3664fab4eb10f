"""Every test runs on eight fake CPU devices, with strict shapes and exact products."""

import os

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
# Compiling is nearly all of the suite's time, and takes half as long without XLA's
# optimisations. JAX_DISABLE_MOST_OPTIMIZATIONS=0 compiles as users do.
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def x64():
    """Float64 arrays inside one test; the suite itself runs in float32, as users do."""
    with jax.enable_x64(True):
        yield
