"""Reads the key-value part of a GGUF file: what a tokenizer needs, without touching the weights.

The `gguf` package keeps a numpy view of every one of the ~100,000 strings of a vocabulary, which takes seconds;
this walks the same bytes once (layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3).
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from kvrelay.errors import ModelFileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_MAX_NESTING = 4


def read_metadata(path: Path) -> dict[str, Any]:
    """All key-value pairs: numbers, strings, and lists of them.

    Raises ModelFileError, naming the file, when it is missing, no GGUF, of another version, or ends too early.
    """
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise ModelFileError(f"{path} is empty; download the model again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(path, data).pairs()
    except OSError as error:
        raise ModelFileError(f"cannot read model file {path}: {error.strerror or error}") from error


class _Cursor:
    """A position in the mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def pairs(self) -> dict[str, Any]:
        if self._data[:4] != MAGIC:
            raise ModelFileError(f"{self._path} is no GGUF file (it starts with {bytes(self._data[:4])!r})")
        self._at = 4
        try:
            version = self._number(_U32)
            if version not in VERSIONS:
                raise ModelFileError(f"{self._path} is GGUF version {version}; versions 2 and 3 are read")
            self._number(_U64)  # tensors
            return {self._string(): self._value(self._number(_U32)) for _ in range(self._number(_U64))}
        except (struct.error, EOFError, UnicodeDecodeError, OverflowError) as error:
            raise ModelFileError(
                f"{self._path} is truncated or damaged near byte {self._at}: {error}; download the model again"
            ) from error

    def _number(self, kind: struct.Struct) -> int:
        value: int = kind.unpack_from(self._data, self._at)[0]
        self._at += kind.size
        return value

    def _string(self) -> str:
        size = self._number(_U64)
        raw = self._data[self._at : self._at + size]
        if len(raw) != size:
            raise EOFError(f"a string of {size} bytes passes the end of the file")
        self._at += size
        return raw.decode("utf-8")

    def _value(self, kind: int, nesting: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(nesting + 1)
        return self._scalars(kind, 1)[0]

    def _array(self, nesting: int) -> list[Any]:
        if nesting > _MAX_NESTING:
            raise EOFError(f"arrays nested deeper than {_MAX_NESTING}")
        kind = self._number(_U32)
        count = self._number(_U64)
        if kind in (_STRING, _ARRAY):
            return [self._value(kind, nesting) for _ in range(count)]
        return list(self._scalars(kind, count))

    def _scalars(self, kind: int, count: int) -> tuple[Any, ...]:
        if kind not in _SCALARS:
            raise EOFError(f"value type {kind} is unknown")
        layout = f"<{count}{_SCALARS[kind]}"
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values
