"""A tokenizer written as a directory's files reads as the one it was."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def written(path: Path, directory: Path) -> Tokenizer:
    for name, content in tokenizer_files(path).items():
        (directory / name).write_bytes(content)
    return load_tokenizer(directory)


@pytest.mark.parametrize("text", TEXTS)
def test_a_gguf_files_tokenizer_gives_the_same_ids_and_text(text: str, tmp_path: Path) -> None:
    own, copy = demo_tokenizer(), written(demo_model_path(), tmp_path)
    token_ids = own.encode(text, add_bos=own.add_bos)
    assert copy.encode(text, add_bos=copy.add_bos) == token_ids
    assert copy.decode(token_ids) == own.decode(token_ids)


def test_a_gguf_files_special_tokens_and_template_are_written_too(tmp_path: Path) -> None:
    own, copy = demo_tokenizer(), written(demo_model_path(), tmp_path)
    assert (copy.eos_token_ids, copy.bos_token_id, copy.add_bos) == (own.eos_token_ids, own.bos_token_id, own.add_bos)
    assert (tmp_path / "tokenizer_config.json").read_text().count("<|im_start|>") > 0


def test_a_directorys_files_are_given_as_they_are(tmp_path: Path) -> None:
    path = make_byte_tokenizer(tmp_path / "bytes")
    (path / "model.safetensors").write_bytes(b"weights are nobody's tokenizer")
    assert tokenizer_files(path) == {
        name: (path / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")
    }
