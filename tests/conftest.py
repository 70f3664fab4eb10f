"""Every test runs on eight fake CPU devices, with strict shapes and exact products."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

import pytest  # noqa: E402


@pytest.fixture
def x64():
    """Float64 arrays inside one test; the suite itself runs in float32, as users do."""
    with jax.enable_x64(True):
        yield
