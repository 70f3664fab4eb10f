"""One CPU device, on which tests run besides the suite's eight."""

import jax
import pytest

from symjax.attention.recurrent import schedule


@pytest.fixture(params=[8, 1], ids=["devices", "one device"])
def on_devices(request, monkeypatch):
    """One device runs the chunks of one example after the other."""
    if request.param == 1:
        jax.clear_caches()
        monkeypatch.setattr(schedule, "xla_keeps_arrays_whole", lambda: True)
    yield
    if request.param == 1:
        jax.clear_caches()
