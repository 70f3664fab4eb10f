"""Small runs for tests: texts, words of command lines, and calls of the programs."""

import contextlib
import importlib
import os
import socket
import sys
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from symjax import validation
from symjax.config import Config, Data
from symjax.data.store.folder import arrays_in
from symjax.distributed.exit_codes import run_and_exit
from symjax.programs.configuration_file import load_config

ROOT = Path(__file__).parent.parent
SECONDS = 900  # limit of a process
_reserved: list[socket.socket] = []
sys.path.insert(0, str(ROOT))  # train.py, eval.py and configs are not installed

TEXT = "".join(
    f"{i} sheep, {i * i % 97} goats and {i * 7 % 31} crows met a fox.\n"
    for i in range(600)
)
SMALL = {
    "model.width": 32,
    "model.depth": 1,
    "model.length": 32,
    "mesh.data": 1,
    "steps": 6,
    "evaluate.batches": 2,
    "data.source": "text",
    "log.attention": "false",  # it compiles one more program
}


@contextlib.contextmanager
def compile_cache(folder: Path):
    """Cache compiled programs in a folder inside the block."""
    before = jax.config.jax_compilation_cache_dir
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
        compilation_cache.reset_cache()


def environment() -> dict[str, str]:
    """Return an environment without proxies: jax warns of them, and they may answer."""
    return {n: v for n, v in os.environ.items() if "_proxy" not in n.lower()}


def reserve_port() -> int:
    """Return a port that the kernel gives to no other process.

    A bound socket that does not listen keeps it until this process ends. It does not
    block sockets that reuse addresses, such as those of a server.
    """
    here = socket.socket()
    here.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    here.bind(("127.0.0.1", 0))
    _reserved.append(here)
    return here.getsockname()[1]


def write_text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def packed(workdir: Path, cache: Path | str = "") -> Path:
    """Return the folder of the packed text of a run."""
    return arrays_in(Data(cache=str(cache)), workdir / "data")


def words(text: Path, workdir: Path | None = None, *more: str, **changes) -> list[str]:
    """Return a command line of train.py; `model__width=8` changes model.width."""
    keys = SMALL | {"data.path": text}
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    given = [f"--config.{name}={value}" for name, value in keys.items()]
    place = [] if workdir is None else ["--workdir", str(workdir)]
    return ["--config", f"{ROOT}/configs/diff_sym.py:tiny", *given, *place, *more]


def preset(name: str, size: str, model=None, attention=None, **changes) -> Config:
    """Return a configuration of configs/ for bytes, with some keys changed."""
    tree = load_config(ROOT / "configs" / f"{name}.py", size).to_dict() | changes
    tree["model"] |= {"vocabulary": 256} | (model or {})
    tree["model"]["attention"] |= attention or {}
    return validation.from_dict(tree)


def call(name: str, arguments: list[str]) -> int:
    """Run train.py or eval.py in this process, and return the exit code."""
    module = importlib.import_module(name)
    try:
        run_and_exit(lambda: module.main(arguments))
    except SystemExit as end:
        return int(end.code or 0)


def train(*arguments, **changes) -> int:
    return call("train", words(*arguments, **changes))
