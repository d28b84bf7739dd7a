"""A model's tokenizer as files of a Hugging Face directory, for who tokenizes elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

from kvrelay.errors import ModelFileError
from kvrelay.tokenizer import load_tokenizer

_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """Contents by name: those of a directory that are there, or what a GGUF file's metadata come to.

    Raises ModelFileError as load_tokenizer, and for a file that cannot be read.
    """
    if path.is_dir():
        return {name: _read(path / name) for name in _NAMES if (path / name).is_file()}
    tokenizer = load_tokenizer(path)
    return {
        "tokenizer.json": tokenizer.to_json().encode(),
        "tokenizer_config.json": json.dumps(tokenizer.config(), indent=2).encode(),
    }


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}") from error
