"""The training step is lowered on this machine for chips that it does not have."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from symjax import config
from symjax.attention.core.devices import lowered_for
from symjax.training.sharding import make_mesh
from symjax.training.step import build_program

MODEL = config.Model(
    vocabulary=21,
    width=16,
    heads=2,
    depth=2,
    length=16,
    dtype="bfloat16",
    attention=config.Attention(symmetric="plain", differential="v1"),
)
MODELS = {
    "differential": replace(MODEL, scan_layers=True, remat="dots"),
    "performer and entmax": replace(
        MODEL,
        pattern=("performer", "entmax15"),
        attention=config.Attention(feature_count=8),
    ),
    "decay and flash": replace(
        MODEL,
        pattern=("decay", "flash"),
        attention=config.Attention(decay="gated", chunk_size=8),
    ),
}


def exported(model: config.Model, *platforms: str) -> jax.export.Exported:
    options = config.Config(batch_size=8, model=model, mesh=config.Mesh(data=2, fsdp=2))
    program = build_program(options, make_mesh(options.mesh))
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    train: Any = program.train
    with jax.set_mesh(program.mesh), lowered_for(*platforms):
        return jax.export.export(train, platforms=platforms)(
            program.state, program.constants, tokens, tokens, key
        )


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in [*MODELS][1:]]


@pytest.mark.parametrize("model", [[*MODELS][0], *SLOW])
def test_the_step_lowers_for_tpu_and_gpu_from_a_machine_without(model):
    found = exported(MODELS[model], "tpu", "cuda")
    assert found.platforms == ("tpu", "cuda") and found.nr_devices == 4
    # without bytes of this machine's own functions, such as LAPACK's
    assert "custom_call @lapack" not in found.mlir_module()


def test_each_platform_gets_its_own_loops():
    """On a CPU attention loops over examples; on an accelerator it does not."""
    loops = {
        platform: exported(MODELS["differential"], platform)
        .mlir_module()
        .count("stablehlo.while")
        for platform in ("cpu", "tpu", "cuda")
    }
    assert loops["tpu"] == loops["cuda"] < loops["cpu"]
