"""A tokenizer written as a directory's files reads as the one it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.errors import ModelFileError
from kvrelay.tokenizer import Tokenizer, load_tokenizer
from kvrelay.tokenizer_files import tokenizer_files
from tests.support.byte_tokenizer import make_byte_tokenizer
from tests.support.demo import demo_model_path, demo_tokenizer

TEXTS = (
    "The capital of France is Paris.",
    "  two blanks\n\nand 1234 digits",
    "naïve 漢字 🙂",
    "<|im_start|>user\nHi<|im_end|>",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's GGUF file, written so."""
    directory = tmp_path_factory.mktemp("tokenizer")
    for name, content in tokenizer_files(demo_model_path()).items():
        (directory / name).write_bytes(content)
    return directory


@pytest.fixture(scope="module")
def copy(directory: Path) -> Tokenizer:
    return load_tokenizer(directory)


@pytest.mark.parametrize("text", TEXTS)
def test_a_gguf_files_tokenizer_gives_the_same_ids_and_text(text: str, copy: Tokenizer) -> None:
    own = demo_tokenizer()
    token_ids = own.encode(text, add_bos=own.add_bos)
    assert copy.encode(text, add_bos=copy.add_bos) == token_ids
    assert copy.decode(token_ids) == own.decode(token_ids)


def test_a_gguf_files_special_tokens_and_template_are_written_too(directory: Path, copy: Tokenizer) -> None:
    own = demo_tokenizer()
    assert (copy.eos_token_ids, copy.bos_token_id, copy.add_bos) == (own.eos_token_ids, own.bos_token_id, own.add_bos)
    assert "<|im_start|>" in (directory / "tokenizer_config.json").read_text()


def test_a_directorys_files_are_given_as_they_are(tmp_path: Path) -> None:
    path = make_byte_tokenizer(tmp_path / "bytes")
    (path / "model.safetensors").write_bytes(b"weights are nobody's tokenizer")
    assert tokenizer_files(path) == {
        name: (path / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")
    }


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_byte_tokenizer(tmp_path / "bytes")

    def refuse(file: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ModelFileError, match=r"cannot read .*bytes/tokenizer\.json: Permission denied"):
        tokenizer_files(path)
