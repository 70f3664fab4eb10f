"""What runs on one CPU device alone, tested beside what runs on the suite's eight."""

import jax
import pytest

from symjax.attention.recurrent import engine, precision, schedule


@pytest.fixture(params=[8, 1], ids=["devices", "one device"])
def on_devices(request, monkeypatch):
    """Of one device chunks stand side by side, and are rescued one by one."""
    if request.param == 1:
        jax.clear_caches()
        for module in (engine, precision, schedule):
            monkeypatch.setattr(module, "on_one_device", lambda: True)
    yield
    if request.param == 1:
        jax.clear_caches()
