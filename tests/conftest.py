"""Settings and fixtures of all tests: eight simulated CPU devices, strict shapes."""

import gc
import os
import tempfile
from importlib import metadata

# The suite's process has a million Python objects. Nearly all are in caches of jax and
# stay, and to look for garbage among them as often as usual takes a tenth of the time.
gc.set_threshold(100_000, 20, 100)

# Nearly all of the suite's time is compiling. It takes half as long without XLA's
# optimisations, and half of that without parallel code generation and without MLIR for
# fusions (which jaxlib 0.11 needs). JAX_DISABLE_MOST_OPTIMIZATIONS=0 compiles as users
# do.
if quick := "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    flags = ["--xla_cpu_parallel_codegen_split_count=1"]
    if metadata.version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")])

# Tests have a cache folder of their own for packed texts and compiled programs.
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the folder
    user_cache = tempfile.TemporaryDirectory(prefix="symjax-tests-")
    os.environ["XDG_CACHE_HOME"] = user_cache.name

import cpu_times  # noqa: E402
import jax  # noqa: E402  (it reads XLA_FLAGS once)
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")
if quick:
    jax.config.update("jax_disable_most_optimizations", True)

# Hypothesis draws the same examples every time, and has no time limit.
settings.register_profile(
    "steady",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("steady")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    """Mark the tests in tests/slow.txt, which tests/cpu_times.py writes, as slow."""
    slow = cpu_times.listed()
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")


@pytest.fixture
def x64():
    """Enable float64 in a whole test. Other tests run in float32 by default."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def compilations():
    """Return a list that gets an entry for every program that is compiled."""
    events = []

    def listen(event: str, duration: float, **_) -> None:
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def quiet(monkeypatch):
    """Print no line about evaluation tasks that take long."""
    monkeypatch.setattr("symjax.evaluation.results.QUIET", 600.0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Share the folder of compiled programs among the runs of all tests."""
    from runs import compile_cache

    folder = tmp_path_factory.getbasetemp() / "jax"
    with compile_cache(folder):
        yield folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    from runs import write_text

    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def bucket():
    from buckets import emulated

    with emulated() as found:
        yield found
