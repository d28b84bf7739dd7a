"""What a model's weights take in memory, from the headers of its files: no tensor is read."""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.errors import ModelFileError
from kvrelay.gguf_metadata import not_whole, read_header
from kvrelay.model.hf_files import INDEX_NAME, WEIGHTS_NAME, read_json

_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # of safetensors
_GGML_FLOAT_BYTES = {0: 4, 1: 2, 28: 8, 30: 2}  # by ggml's number of the type: F32, F16, F64, BF16
_SIZE = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100 * 10**6  # what the safetensors library allows
_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Floats take what the dtype of a node makes of them; what is packed otherwise stays as the files have it."""

    num_floats: int
    packed_bytes: int
    num_packed: int = 0  # values in those bytes, where the files say; 0 where they do not

    def in_dtype(self, item_bytes: int) -> int:
        return self.num_floats * item_bytes + self.packed_bytes

    def unpacked(self) -> WeightBytes:
        """On a node that turns all into its dtype."""
        return WeightBytes(self.num_floats + self.num_packed, 0) if self.num_packed else self

    def __add__(self, other: WeightBytes) -> WeightBytes:
        return WeightBytes(
            self.num_floats + other.num_floats,
            self.packed_bytes + other.packed_bytes,
            self.num_packed + other.num_packed,
        )


def read_weight_bytes(path: Path) -> WeightBytes:
    """Of a GGUF file, with its other parts if it is split, or of a Hugging Face directory's safetensors.

    Raises ModelFileError, naming the file, when one is missing or not whole.
    """
    read, files = (_of_safetensors, _safetensors(path)) if path.is_dir() else (_of_gguf, _parts(path))
    return sum((read(file) for file in files), start=WeightBytes(0, 0))


def _safetensors(directory: Path) -> list[Path]:
    index = directory / INDEX_NAME
    if not index.is_file():
        return [directory / WEIGHTS_NAME]
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict):
        raise ModelFileError(f"{index} must say in weight_map which file each tensor is in")
    return [directory / name for name in sorted(set(map(str, files.values())))]


def _parts(path: Path) -> list[Path]:
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    stem, total = found.groups()
    return [path.with_name(f"{stem}-{part:05}-of-{total}.gguf") for part in range(1, int(total) + 1)]


def _of_safetensors(path: Path) -> WeightBytes:
    """Layout: https://huggingface.co/docs/safetensors."""
    try:
        with path.open("rb") as file:
            (header_bytes,) = _SIZE.unpack(file.read(_SIZE.size))
            if header_bytes > _MAX_HEADER_BYTES:
                raise ValueError(f"its header would have {header_bytes} bytes")
            header: dict[str, dict[str, Any]] = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            sizes = [(tensor["dtype"], _size(tensor["data_offsets"])) for tensor in header.values()]
            data_bytes = file.seek(0, 2) - _SIZE.size - header_bytes
        if sum(size for _, size in sizes) > data_bytes:
            raise ValueError("its tensors pass its end")
    except FileNotFoundError as error:
        raise ModelFileError(f"there is no model file {path}") from error
    except OSError as error:
        raise ModelFileError(f"cannot read model file {path}: {error.strerror or error}") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(f"{path} is not a whole safetensors file (truncated download?): {error}") from error
    return WeightBytes(
        num_floats=sum(size // _FLOAT_BYTES[dtype] for dtype, size in sizes if dtype in _FLOAT_BYTES),
        packed_bytes=sum(size for dtype, size in sizes if dtype not in _FLOAT_BYTES),
    )


def _size(offsets: list[int]) -> int:
    start, end = offsets
    return end - start


def _of_gguf(path: Path) -> WeightBytes:
    tensors = sorted(read_header(path).tensors.values(), key=lambda tensor: tensor.start)
    file_bytes = path.stat().st_size
    ends = [*(tensor.start for tensor in tensors[1:]), file_bytes]
    found = WeightBytes(0, 0)
    for tensor, end in zip(tensors, ends, strict=True):
        count, float_bytes = math.prod(tensor.shape), _GGML_FLOAT_BYTES.get(tensor.kind, 0)
        if tensor.start + max(1, count * float_bytes) > file_bytes:
            raise not_whole(path, "its tensors pass its end")
        found += WeightBytes(count, 0) if float_bytes else WeightBytes(0, end - tensor.start, count)
    return found
