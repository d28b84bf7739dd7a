"""What weights take, read from the headers of files alone."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvrelay.errors import ModelFileError
from kvrelay.model.weight_bytes import WeightBytes, read_weight_bytes


def write_safetensors(path: Path, sizes: dict[str, int], *, cut: int = 0) -> None:
    """One tensor of each dtype, of so many bytes; the last `cut` bytes of the file are missing."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for dtype, size in sizes.items():
        header[f"of.{dtype}"] = {"dtype": dtype, "shape": [size], "data_offsets": [at, at + size]}  # type: ignore[dict-item]
        at += size
    encoded = json.dumps(header).encode()
    path.write_bytes((struct.pack("<Q", len(encoded)) + encoded + bytes(at))[: -cut or None])


def write_gguf(path: Path) -> Path:
    """A float32 norm of 64 values and a matrix of 2 x 64 in Q8_0: 34 bytes for 32 of them."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("norm", np.ones(64, np.float32))
    matrix = gguf.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("matrix", matrix, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_floats_take_what_the_dtype_makes_of_them() -> None:
    weights = WeightBytes(num_floats=100, packed_bytes=7, num_packed=50)
    assert [weights.in_dtype(item_bytes) for item_bytes in (2, 4)] == [207, 407]
    assert [weights.unpacked().in_dtype(item_bytes) for item_bytes in (2, 4)] == [300, 600]
    assert WeightBytes(100, 7).unpacked() == WeightBytes(100, 7)


def test_one_file_of_safetensors(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"BF16": 200, "F32": 400, "I32": 12})
    assert read_weight_bytes(tmp_path) == WeightBytes(num_floats=200, packed_bytes=12)


def test_shards_count_once_each_and_files_beside_the_index_do_not(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "1.safetensors", {"BF16": 200, "F16": 20})
    write_safetensors(tmp_path / "2.safetensors", {"BF16": 2})
    write_safetensors(tmp_path / "consolidated.safetensors", {"BF16": 222})
    index = {"weight_map": {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_weight_bytes(tmp_path) == WeightBytes(num_floats=111, packed_bytes=0)
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"there is no model file .*2\.safetensors"):
        read_weight_bytes(tmp_path)


@pytest.mark.parametrize("index", [{}, {"weight_map": ["1.safetensors"]}])
def test_an_index_that_names_no_files_is_refused(index: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"index\.json must say in weight_map which file each tensor is in"):
        read_weight_bytes(tmp_path)


def test_gguf_keeps_what_is_quantised_until_it_is_unpacked(tmp_path: Path) -> None:
    weights = read_weight_bytes(write_gguf(tmp_path / "tiny.gguf"))
    assert weights.num_floats == 64
    assert 136 <= weights.packed_bytes < 136 + 32  # the file is filled up to a multiple of 32
    assert weights.unpacked() == WeightBytes(64 + 128, 0)


def test_every_part_of_a_split_gguf_counts(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "tiny-00001-of-00002.gguf")
    with pytest.raises(ModelFileError, match=r"there is no model file .*tiny-00002-of-00002\.gguf"):
        read_weight_bytes(first)
    write_gguf(tmp_path / "tiny-00002-of-00002.gguf")
    assert read_weight_bytes(first).num_floats == 128


@pytest.mark.parametrize(
    "content", [b"", b"1234567", struct.pack("<Q", 2**40), struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b"{}"]
)
def test_what_is_no_whole_safetensors_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"model\.safetensors is not a whole safetensors file"):
        read_weight_bytes(tmp_path)


def test_a_download_that_was_cut_off_is_found(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"BF16": 200}, cut=1)
    with pytest.raises(ModelFileError, match="its tensors pass its end"):
        read_weight_bytes(tmp_path)
    path = write_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-250])
    with pytest.raises(ModelFileError, match="not a whole GGUF file"):
        read_weight_bytes(path)
