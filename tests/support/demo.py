"""The demo model, fetched once per machine (`make test` does it first) and shared by the tests that need real text."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from kvrelay.demo_model import fetch
from kvrelay.tokenizer import Tokenizer, load_tokenizer

GOLDEN = Path(__file__).parent.parent / "golden"


@cache
def demo_model_path() -> Path:
    return fetch()


@cache
def demo_tokenizer() -> Tokenizer:
    return load_tokenizer(demo_model_path())


def golden_cases(name: str = "smollm2_gguf_f32.jsonl") -> list[dict[str, Any]]:
    """Reference prompts and answers; tests/golden/README.md says where they come from."""
    return [json.loads(line) for line in (GOLDEN / name).read_text("utf-8").splitlines()]
