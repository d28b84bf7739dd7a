from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from kvrelay.errors import ModelFileError
from kvrelay.model.fingerprint import model_fingerprint


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Files by name only: a fingerprint does not look into them."""
    path = tmp_path / "model"
    path.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (path / name).write_text(f"content of {name}")
    return path


def cache_of(directory: Path) -> Path:
    return directory / ".kvrelay-fingerprint.json"


def test_fingerprint_of_a_file_is_a_golden_value(tmp_path: Path) -> None:
    """SHA-256 of: domain, length of the (empty) name as 8 little-endian bytes, SHA-256 of the content."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    expected = hashlib.sha256(b"kvrelay-model-v1" + bytes(8) + hashlib.sha256(b"weights").digest()).hexdigest()
    assert model_fingerprint(path) == expected


def test_fingerprint_of_a_directory_is_a_golden_value(directory: Path) -> None:
    assert model_fingerprint(directory) == ("0d8f09dadc9d38a6361b7ddcacfeea4acee138e270f1cb8804e0815c6f1f7c68")


def test_place_and_time_do_not_count_but_content_does(directory: Path, tmp_path: Path) -> None:
    first = model_fingerprint(directory)
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(directory, copy)
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    assert model_fingerprint(copy) == first
    (copy / "model.safetensors").write_text("Content of model.safetensors")
    assert model_fingerprint(copy) != first


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_every_model_file_counts(name: str, directory: Path) -> None:
    first = model_fingerprint(directory)
    (directory / name).write_text("something else")
    assert model_fingerprint(directory) != first


def test_other_files_do_not_count(directory: Path) -> None:
    first = model_fingerprint(directory)
    (directory / "README.md").write_text("hello")
    assert model_fingerprint(directory) == first


def test_a_file_that_moves_between_names_counts(directory: Path) -> None:
    first = model_fingerprint(directory)
    (directory / "model.safetensors").rename(directory / "other.safetensors")
    assert model_fingerprint(directory) != first


def test_a_kept_fingerprint_is_used_while_sizes_and_times_stay(directory: Path) -> None:
    model_fingerprint(directory)
    kept = json.loads(cache_of(directory).read_text())
    cache_of(directory).write_text(json.dumps(kept | {"fingerprint": "kept"}))
    assert model_fingerprint(directory) == "kept"
    os.utime(directory / "config.json", (1, 1))
    assert model_fingerprint(directory) != "kept"


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"files": 1, "fingerprint": "x"}'])
def test_a_broken_cache_file_is_replaced(content: str, directory: Path) -> None:
    first = model_fingerprint(directory)
    cache_of(directory).write_text(content)
    assert model_fingerprint(directory) == first
    assert json.loads(cache_of(directory).read_text())["fingerprint"] == first


def test_two_files_in_one_directory_keep_apart(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_text(name)
    prints = [model_fingerprint(tmp_path / name) for name in ("a.gguf", "b.gguf", "a.gguf", "b.gguf")]
    assert prints[:2] == prints[2:]
    assert prints[0] != prints[1]


def test_a_cache_that_cannot_be_written_is_done_without(directory: Path) -> None:
    expected = model_fingerprint(directory)
    cache_of(directory).unlink()
    cache_of(directory).mkdir()  # nobody, root included, can replace a directory by a file
    assert model_fingerprint(directory) == expected
    assert sorted(file.name for file in directory.iterdir() if "fingerprint" in file.name) == [
        ".kvrelay-fingerprint.json"
    ]


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_nothing_to_hash_is_an_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelFileError, match=f"there is no model at .*{name}"):
        model_fingerprint(tmp_path / name)
