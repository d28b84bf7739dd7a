"""Reference answers of the real model; tests/golden/README.md says where they come from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent.parent / "golden"
FLOAT32 = "smollm2_gguf_f32.jsonl"
BFLOAT16_WEIGHTS = "smollm2_bf16_weights_f32.jsonl"


@dataclass(frozen=True)
class GoldenCase:
    name: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    margins: tuple[float, ...]  # per step: top-1 minus top-2 logit

    def num_certain(self, margin: float) -> int:
        """Steps before the first one whose margin is below this: rounding cannot have flipped those."""
        return next((i for i, step in enumerate(self.margins) if step < margin), len(self.margins))


@cache
def load(file_name: str = FLOAT32) -> tuple[GoldenCase, ...]:
    return tuple(_case(row) for row in rows(file_name))


def rows(file_name: str = FLOAT32) -> list[dict[str, Any]]:
    """The cases with all that was noted of them."""
    return [json.loads(line) for line in (DIRECTORY / file_name).read_text("utf-8").splitlines()]


def _case(row: dict[str, Any]) -> GoldenCase:
    return GoldenCase(
        name=row["name"],
        prompt_ids=tuple(row["prompt_ids"]),
        output_ids=tuple(row["output_ids"]),
        margins=tuple(step["margin"] for step in row["steps"]),
    )
