"""Execute notebooks and write their outputs into them.

    python notebooks/execute.py [notebooks/attention.ipynb …]

It needs `pip install -e '.[test]'`. Each notebook imports symjax from this repository
and runs in an empty folder. Times are not stored, since they differ on every machine.
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
SECONDS = 600  # limit of a cell


def executed(path: Path) -> nbformat.NotebookNode:
    """Return the notebook with new outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    paths = str(FOLDER.parent), os.environ.get("PYTHONPATH")
    path_of_python = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            timeout=SECONDS,
            record_timing=False,
            resources={"metadata": {"path": folder}},
        ).execute(env={**os.environ, "PYTHONPATH": path_of_python})
    notebook.metadata = {
        "kernelspec": notebook.metadata.kernelspec,
        "language_info": {"name": "python"},
    }
    return notebook


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else FOLDER.glob("*.ipynb"):
        nbformat.write(executed(path), path)
        print(path)
