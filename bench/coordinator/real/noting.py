"""What a run on a real cluster is judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from bench.coordinator.real.asking import Goal, Seen
from bench.engine.table import percentile
from bench.handoff.samples import Samples

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Line:
    """Of a table, to which one run adds."""

    samples: Samples
    table: str
    name: str

    def add(self, column: str, value: float) -> None:
        self.samples.add(self.table, self.name, column, value)

    def add_share(self, column: str, num: float, of: float) -> None:
        """In percent; nothing where there is nothing to be a part of."""
        if of:
            self.add(column, 100 * num / of)

    def add_first_tokens(self, seen: Sequence[Seen]) -> None:
        firsts_s = [one.answer.first_token_s for one in seen if one.began]
        for percent in (50, 95):
            if firsts_s:
                self.add(f"TTFT p{percent}, s", percentile(firsts_s, percent))

    def add_goodput(self, seen: Sequence[Seen], goal: Goal, seconds: float) -> None:
        self.add("goodput /s", sum(one.met(goal) for one in seen) / seconds)


def in_turn(policies: Sequence[T], round_number: int) -> Sequence[T]:
    """Another order in every other round, so that none is always measured after the same one."""
    return policies if round_number % 2 else policies[::-1]
