"""The demo model, fetched once per machine (`make test` does it first) and shared by the tests that need real text."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from kvrelay.demo_model import fetch
from kvrelay.tokenizer import Tokenizer, load_tokenizer


@cache
def demo_model_path() -> Path:
    return fetch()


@cache
def demo_tokenizer() -> Tokenizer:
    return load_tokenizer(demo_model_path())
