"""The table of kernels, and when their modules are imported."""

import subprocess
import sys

import pytest

from symjax.attention.kernels import dispatch

SOURCES = {x for kernels in dispatch.KERNELS.values() for x in kernels}


@pytest.mark.parametrize("source", sorted(SOURCES, key=str), ids=lambda x: x.class_name)
def test_every_kernel_of_the_table_is_there(source):
    kernel = source(None)
    assert type(kernel).__name__ == source.class_name
    assert callable(kernel.refusal) and callable(kernel.attend)


def test_a_call_on_a_cpu_imports_no_kernel():
    code = """
import sys
import jax.numpy as jnp
from symjax import attention
x = jnp.ones((1, 128, 2, 8), jnp.bfloat16)
attention.softmax(x, x, x)
attention.linear_causal(x, x, x)
assert "symjax.attention.kernels.dispatch" in sys.modules
assert not [x for x in sys.modules if ".kernels.gpu" in x or ".kernels.tpu" in x]
assert "jax.experimental.mosaic.gpu" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
