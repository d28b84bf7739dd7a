"""Public traces of what prompts share: see traces/README.md."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

TRACES = ("conversation", "synthetic")
BLOCK_TOKENS = 512

_DIRECTORY = Path(__file__).parent / "traces"


def read_trace(name: str) -> list[list[int]]:
    """Each request's full blocks, in order: the store keeps no partial ones."""
    with lzma.open(_DIRECTORY / f"{name}_trace.jsonl.xz", "rt") as lines:
        requests = map(json.loads, lines)
        return [request["hash_ids"][: request["input_length"] // BLOCK_TOKENS] for request in requests]


def num_distinct(requests: list[list[int]]) -> int:
    return len({block for request in requests for block in request})
