"""The model fingerprint: a content hash of weights, config and tokenizer, the same on every machine.

Hashing reads every byte, so the result is kept in a small file beside the model, valid as long as names, sizes and
modification times of the hashed files stay as they were. Where that file cannot be written it is computed each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from pathlib import Path

from kvrelay.errors import ModelFileError

_DOMAIN = b"kvrelay-model-v1"
_CACHE_NAME = ".kvrelay-fingerprint.json"
# What the nodes read of a Hugging Face directory: what else lies there does not change a token.
_HF_PATTERNS = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)

_log = logging.getLogger(__name__)


def model_fingerprint(path: Path) -> str:
    """Hex SHA-256 of a GGUF file (its name does not count) or of a Hugging Face directory's model files.

    Raises ModelFileError if there is nothing to hash.
    """
    names = _file_names(path)
    cache_path = path / _CACHE_NAME if path.is_dir() else path.with_name(f".{path.name}{_CACHE_NAME}")
    stamp = _stamp(names)
    cached = _read_cache(cache_path, stamp)
    if cached is not None:
        return cached
    fingerprint = _hash(names)
    if _stamp(names) == stamp:  # else a file changed while it was read
        _write_cache(cache_path, stamp, fingerprint)
    return fingerprint


def _file_names(path: Path) -> dict[str, Path]:
    """Name that enters the hash -> file."""
    if path.is_dir():
        files = {file.name: file for pattern in _HF_PATTERNS for file in path.glob(pattern) if file.is_file()}
        if files:
            return dict(sorted(files.items()))
    elif path.is_file():
        return {"": path}
    raise ModelFileError(f"there is no model at {path}")


def _hash(files: dict[str, Path]) -> str:
    digest = hashlib.sha256(_DOMAIN)
    for name, file in files.items():
        encoded = name.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def _stamp(files: dict[str, Path]) -> dict[str, list[int]]:
    """What tells that files are as they were, without reading them."""
    return {name: [file.stat().st_size, file.stat().st_mtime_ns] for name, file in files.items()}


def _read_cache(cache_path: Path, stamp: dict[str, list[int]]) -> str | None:
    try:
        cached = json.loads(cache_path.read_bytes())
        fingerprint = cached["fingerprint"] if cached["files"] == stamp else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent, or not ours: compute it
    return fingerprint if isinstance(fingerprint, str) else None


def _write_cache(cache_path: Path, stamp: dict[str, list[int]], fingerprint: str) -> None:
    """By rename, so that a node reading at the same time sees all or nothing."""
    draft = cache_path.with_name(f"{cache_path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps({"files": stamp, "fingerprint": fingerprint}))
        draft.replace(cache_path)
    except OSError as error:
        _log.info("the model fingerprint is not kept beside the model: %s", error)
        with contextlib.suppress(OSError):
            draft.unlink()
