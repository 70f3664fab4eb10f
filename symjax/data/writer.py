"""Arrays written to .npy files piece by piece."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np


class Writer:
    """A .npy file of one axis, to which arrays are appended.

    The header has room for any length: it is written again when the file is closed.
    """

    def __init__(self, path: Path, dtype: Any):
        self.path, self.dtype, self.length = path, np.dtype(dtype), 0
        self._file = path.open("wb")
        self._header()
        self._begin = self._file.tell()

    def append(self, array: np.ndarray) -> None:
        """Raises: ValueError: the type is not the file's."""
        if array.dtype != self.dtype:
            raise ValueError(f"{self.path} has {self.dtype}, got {array.dtype}")
        self._file.write(array.tobytes())
        self.length += len(array)

    def close(self) -> None:
        self._file.seek(0)
        self._header()
        if self._file.tell() != self._begin:
            raise RuntimeError(f"the header of {self.path} has changed its size")
        self._file.close()
        os.utime(self.path.parent)  # a folder in use is not taken for an abandoned one

    def _header(self) -> None:
        described = np.lib.format.dtype_to_descr(self.dtype)
        facts = {"descr": described, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, facts)
