"""Reads what stands before the weights of a GGUF file: key-value pairs and where each tensor lies.

The `gguf` package keeps a numpy view of every one of the ~100,000 strings of a vocabulary, which takes seconds;
this walks the same bytes once (layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor in the file. `shape` has the fastest axis first, as in GGUF; `kind` is ggml's number of its type."""

    shape: tuple[int, ...]
    kind: int
    start: int  # byte in the file


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """`metadata` values are numbers, strings, and lists of them."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]


def read_header(path: Path) -> GGUFHeader:
    """Raises ModelFileError, naming the file, when it is missing, no GGUF, of another version, or ends too early."""
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise not_whole(path, "it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(path, data).header()
    except FileNotFoundError as error:
        raise ModelFileError(f"there is no model file {path}") from error
    except OSError as error:
        raise ModelFileError(f"cannot read model file {path}: {error.strerror or error}") from error


def not_whole(path: Path, why: str) -> ModelFileError:
    return ModelFileError(f"{path} is not a whole GGUF file (truncated download?): {why}")


class _Cursor:
    """A position in the mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def header(self) -> GGUFHeader:
        start = self._data[: len(MAGIC)]
        if start != MAGIC:
            if MAGIC.startswith(start):
                raise not_whole(self._path, f"it has {len(start)} bytes")
            raise ModelFileError(f"{self._path} is not a GGUF file: it starts with {start!r}, not {MAGIC!r}")
        self._at = 4
        try:
            version = self._number(_U32)
            if version not in VERSIONS:
                raise ModelFileError(f"{self._path} is GGUF version {version}; versions 2 and 3 are read")
            num_tensors = self._number(_U64)
            num_pairs = self._number(_U64)
            metadata = {self._string(): self._value(self._number(_U32)) for _ in range(num_pairs)}
            return GGUFHeader(metadata, self._tensors(num_tensors, metadata.get("general.alignment", 32)))
        except (struct.error, EOFError, ArithmeticError, TypeError, UnicodeDecodeError) as error:
            raise not_whole(self._path, f"{error}, near byte {self._at}") from error

    def _tensors(self, count: int, alignment: int) -> dict[str, TensorPlace]:
        listed = {}
        for _ in range(count):
            name, num_axes = self._string(), self._number(_U32)
            shape = tuple(self._number(_U64) for _ in range(num_axes))
            listed[name] = (shape, self._number(_U32), self._number(_U64))
        data_start = -(-self._at // alignment) * alignment
        return {name: TensorPlace(shape, kind, data_start + offset) for name, (shape, kind, offset) in listed.items()}

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
