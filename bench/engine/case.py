"""What is measured, the same for every engine. Standard library only: peers' environments import it too.

- **Prefill of T tokens**: one prompt of T random distinct token ids, no prefix cached. T divided by the time from the
  request to its first token.
- **Decode of batch B at context C**: B such prompts at once, then greedy tokens past any end-of-sequence. A *full* step
  gives each of the B sequences a token; the first `NUM_WARM_UP_STEPS` of them are left out (they hold prompt tokens
  too). B divided by the mean time between full steps. Prompts are as long as puts C in the middle of what is counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

NUM_WARM_UP_STEPS = 4
NUM_AHEAD_STEPS = 16  # the first sequences may be so many steps ahead of the last, where prompts run in several steps


@dataclass(frozen=True, slots=True)
class Case:
    """`num_tokens` of a prompt to prefill, or the context to decode at."""

    kind: Literal["prefill", "decode"]
    num_tokens: int
    batch: int = 1

    @property
    def name(self) -> str:
        if self.kind == "prefill":
            return f"prefill {self.num_tokens:,}"
        return f"decode {self.batch} at {self.num_tokens:,}"

    def prompt_tokens(self, num_steps: int) -> int:
        """Of each prompt, when `num_steps` full steps are counted."""
        if self.kind == "prefill":
            return self.num_tokens
        return self.num_tokens - NUM_WARM_UP_STEPS - num_steps // 2

    def output_tokens(self, num_steps: int) -> int:
        """Of each answer. More than are counted: who is ahead must not end before the last has its steps."""
        return 1 if self.kind == "prefill" else NUM_WARM_UP_STEPS + num_steps + NUM_AHEAD_STEPS

    def max_len(self, num_steps: int) -> int:
        """Positions of one sequence, prompt and answer together."""
        return self.prompt_tokens(num_steps) + self.output_tokens(num_steps)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an engine as it is seen from outside."""

    ended_at: float  # seconds since the request
    num_given: int  # tokens that it gave, of all sequences


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one case. `gaps_s` are the times between full steps; none for a prefill."""

    tokens_per_s: float
    gaps_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker is asked to do, once for each case."""

    model: str
    threads: int
    cases: tuple[Case, ...]
    num_steps: int  # full steps counted, at most
    vocab_size: int
    seed: int
    spawned_at: float  # time.monotonic() just before the worker's process started
    dtype: str = "bfloat16"  # of KV and computation; kvrelay's alone, a peer's worker knows its own
    weights: Literal["dtype", "file"] = "dtype"  # likewise: expanded to `dtype`, or as the file has them
    decoder: str = "auto"  # likewise: auto, native, torch
    cpus: tuple[int, ...] = ()  # the only ones the process may use; empty: any
    busy: bool = False  # run the first case over and over until standard input closes

    @property
    def max_batch(self) -> int:
        return max(case.batch for case in self.cases)

    @property
    def max_len(self) -> int:
        return max(case.max_len(self.num_steps) for case in self.cases)

    def num_blocks(self, block_tokens: int) -> int:
        """KV blocks of all sequences that run at once, of the largest case."""
        return max(case.batch * -(-case.max_len(self.num_steps) // block_tokens) for case in self.cases)


def task_from_json(fields: dict[str, Any]) -> Task:
    """The inverse of dataclasses.asdict, through JSON."""
    cases = tuple(Case(**case) for case in fields["cases"])
    return Task(**(fields | {"cases": cases, "cpus": tuple(fields["cpus"])}))


def prefill_sample(num_tokens: int, steps: Sequence[Step]) -> Sample:
    """Raises ValueError if no step gave a token."""
    first = next((step.ended_at for step in steps if step.num_given), None)
    if first is None:
        raise ValueError("no step gave a token")
    return Sample(num_tokens / first)


def decode_sample(batch: int, num_steps: int, steps: Sequence[Step]) -> Sample:
    """Of at most `num_steps` full steps. Raises ValueError if there are less than half of them."""
    ends = [step.ended_at for step in steps if step.num_given == batch]
    counted = ends[NUM_WARM_UP_STEPS - 1 : NUM_WARM_UP_STEPS + num_steps]
    gaps_s = tuple(later - earlier for earlier, later in itertools.pairwise(counted))
    if len(gaps_s) < num_steps / 2:
        raise ValueError(f"{len(ends)} of {len(steps)} steps gave all {batch} sequences a token; too few to count")
    return Sample(batch * len(gaps_s) / sum(gaps_s), gaps_s)
