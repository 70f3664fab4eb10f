"""Kill a build of a corpus at every line it runs (kill −9), and build again each time.

    python tests/data/killed_builds.py FOLDER

Prints how many builds were killed. Each build is a fork that kills itself before the
n-th line of `open_folder` or of the functions that it calls to write files.
"""

import inspect
import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from symjax import (
    config,  # noqa: E402
    storage,  # noqa: E402
)
from symjax.data import corpus  # noqa: E402
from symjax.data.sources import table  # noqa: E402
from symjax.data.store import (
    cache,  # noqa: E402
    folder,  # noqa: E402
    manifest,  # noqa: E402
)
from symjax.data.store.writer import ArrayWriter  # noqa: E402

TRACED = {
    inspect.unwrap(function).__code__
    for function in (
        *(corpus._pack, folder.open_folder, cache._pack_into_cache),
        *(storage.replaced, ArrayWriter.close, np.save, Path.write_text),
    )
}


def build_and_die(options: config.Data, directory: Path, place: int) -> None:
    """Build a corpus, and kill this process before line number `place`."""
    lines = iter(range(place))

    def follow(frame, event, _):
        if event == "line" and next(lines, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return follow

    sys.settrace(lambda frame, *_: follow if frame.f_code in TRACED else None)
    corpus.open_corpus(options, directory)


def killed(options: config.Data, directory: Path, place: int) -> bool:
    """Return whether a build in a process of its own was killed before its end."""
    child = os.fork()
    if not child:
        try:
            build_and_die(options, directory, place)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"the build ended with {code}")
    return code != 0


def check(options: config.Data, directory: Path, place: int) -> bool:
    """Kill a build at a line. The next build must have the whole old or new text."""
    source = Path(options.path)
    texts = [f"{name} {place}, ".encode() * 40 for name in ("old", "new")]
    source.write_bytes(texts[0])
    died = killed(options, directory, place)
    whole = (directory / manifest.MANIFEST).exists()
    source.write_bytes(texts[1])
    opened = corpus.open_corpus(options, directory)
    found = bytes(opened.train[:]) + bytes(opened.heldout[:])
    if found != texts[not whole]:
        raise RuntimeError(f"killed at line {place}, a corpus of {found!r} was trusted")
    kept = [path for path in Path(options.cache).iterdir() if path.suffix != ".lock"]
    if any(path.name.startswith(storage.UNFINISHED) for path in kept):
        raise RuntimeError(f"killed at line {place}, {kept} was left")
    for path in (directory, *kept):
        shutil.rmtree(path)
    return died


def main(folder: Path) -> None:
    cached = str(folder / "cache")
    options = config.Data("text", str(folder / "source.txt"), cache=cached)
    (folder / "source.txt").write_text("a text to read")
    table.load(options)  # slow imports happen once, not in every child
    died = (check(options, folder / "data", place) for place in itertools.count())
    print(len(list(itertools.takewhile(bool, died))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
