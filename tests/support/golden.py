"""Reference answers of the real model; tests/golden/README.md says where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.support.demo import golden_cases

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
    return tuple(_case(row) for row in golden_cases(file_name))


def _case(row: dict[str, Any]) -> GoldenCase:
    return GoldenCase(
        name=row["name"],
        prompt_ids=tuple(row["prompt_ids"]),
        output_ids=tuple(row["output_ids"]),
        margins=tuple(step["margin"] for step in row["steps"]),
    )
