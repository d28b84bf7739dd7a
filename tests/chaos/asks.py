"""What will be asked: shapes of requests and who asks which, pure functions of the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from kvrelay.sampling import SamplingParams

NUM_FAMILIES = 3  # of prompts that begin alike
LEAVING_SHARE = 0.15  # of the asks, whose client does not wait for the end
SEVERAL = (2, 3)  # answers to one prompt, where there are several
BURST_SHARE = 0.3  # of the asks, which follow the one before at once


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one model's prompts and answers, in tokens."""

    first_id: int  # prompts are drawn from [first_id, last_id)
    last_id: int
    short: tuple[int, int]
    long: tuple[int, int]
    shared: tuple[int, int]  # of the part that a family has in common
    answers: tuple[int, ...]
    num_blocks: int  # that hold the longest of them
    eos_token_ids: tuple[int, ...]


TINY = Sizes(3, 259, (3, 40), (250, 600), (96, 256), (1, 2, 8, 32, 90, 200, 300, 400), 64, (2,))
DEMO = Sizes(100, 40_000, (3, 40), (150, 400), (96, 160), (1, 2, 8, 24, 48), 64, (2,))


@dataclass(frozen=True, slots=True)
class Shape:
    """A request whose answer is known beforehand. With `wants_stop`, a string of its answer's text ends it."""

    number: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    wants_stop: bool = False

    def __str__(self) -> str:
        stop = " with a stop string" if self.wants_stop else ""
        return f"shape {self.number} ({len(self.prompt_ids)} prompt tokens, n={self.n}, {self.sampling}{stop})"


class Leave(Enum):
    """How a client ends a request early."""

    DROP = "drops the stream"
    CANCEL = "calls Cancel"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of one worker, `pause_s` after its last one ended."""

    worker: int
    number: int
    shape: int
    coordinator: int
    pause_s: float
    leave: Leave | None = None
    leave_after_s: float = 0.0

    @property
    def name(self) -> str:
        return f"w{self.worker}-{self.number}"

    def __str__(self) -> str:
        leaves = f", {self.leave.value} after {self.leave_after_s:.2f} s" if self.leave else ""
        return f"{self.name} (shape {self.shape} to coordinator {self.coordinator}{leaves})"


def plan_shapes(seed: int, count: int, sizes: Sizes) -> tuple[Shape, ...]:
    draw = random.Random(f"shapes {seed}")
    families = [_prompt(draw, draw.randint(*sizes.shared), sizes) for _ in range(NUM_FAMILIES)]
    return tuple(_shape(draw, number, families, sizes) for number in range(count))


def asks(seed: int, worker: int, num_shapes: int, num_coordinators: int) -> Iterator[Ask]:
    """Without end; the same for the same arguments."""
    draw = random.Random(f"asks {seed} {worker}")
    number = 0
    while True:
        pause_s = 0.0 if draw.random() < BURST_SHARE else draw.uniform(0.02, 0.6)
        ask = Ask(worker, number, draw.randrange(num_shapes), draw.randrange(num_coordinators), round(pause_s, 3))
        if draw.random() < LEAVING_SHARE:
            ask = replace(ask, leave=draw.choice(list(Leave)), leave_after_s=round(draw.expovariate(2.0), 3))
        yield ask
        number += 1


def _shape(draw: random.Random, number: int, families: list[tuple[int, ...]], sizes: Sizes) -> Shape:
    match number % 3:
        case 0:
            prompt_ids = _prompt(draw, draw.randint(*sizes.short), sizes)
        case 1:
            prompt_ids = _prompt(draw, draw.randint(*sizes.long), sizes)
        case _:
            prompt_ids = draw.choice(families) + _prompt(draw, draw.randint(1, 60), sizes)
    wants_stop = number % 8 in (5, 7)
    max_tokens, seed = draw.choice(sizes.answers[3:] if wants_stop else sizes.answers), draw.randrange(2**32)
    greedy = SamplingParams(temperature=0.0, seed=seed, max_tokens=max_tokens, ignore_eos=True)
    drawn = replace(greedy, temperature=draw.choice((0.7, 1.0, 1.3)), ignore_eos=draw.random() < 0.5)
    match number % 8:
        case 0:
            return Shape(number, prompt_ids, greedy)
        case 1:
            return Shape(number, prompt_ids, drawn)
        case 2:
            return Shape(number, prompt_ids, replace(drawn, top_k=40, top_p=0.9))
        case 3:
            return Shape(number, prompt_ids, replace(greedy, frequency_penalty=0.8, presence_penalty=0.3))
        case 4:
            return Shape(number, prompt_ids, replace(drawn, logprobs=2))
        case 5:
            return Shape(number, prompt_ids, greedy, wants_stop=True)
        case 6:
            return Shape(number, prompt_ids, drawn, n=draw.randint(*SEVERAL))
        case _:
            return Shape(number, prompt_ids, replace(drawn, repetition_penalty=1.2), n=SEVERAL[0], wants_stop=True)


def _prompt(draw: random.Random, num_tokens: int, sizes: Sizes) -> tuple[int, ...]:
    return tuple(draw.randrange(sizes.first_id, sizes.last_id) for _ in range(num_tokens))
