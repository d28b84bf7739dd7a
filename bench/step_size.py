"""What steps that adapt to waits are worth: python -m bench.step_size

Runs the prefill node's own scheduler in virtual time: long prompts are always there, short ones come at random, and a
step takes a fixed part and one for each token, as on a machine of the kind that is named. It reads no clock: numbers
are the same anywhere.
"""

from __future__ import annotations

import random
import statistics
import sys
from dataclasses import dataclass, field

from kvrelay.engine.adaptive import AdaptiveBound
from kvrelay.limits import PrefillLimits, QueueMarks
from prefill_node.scheduler import JobId, PrefillScheduler

SECONDS = 600.0
LONG_TOKENS, SHORT_TOKENS = 6_000, 100
NUM_LONG = 2  # in work at any time
LEAST_STEP_TOKENS = 32


@dataclass(frozen=True)
class Machine:
    name: str
    step_s: float
    token_s: float
    max_batched_tokens: int
    short_per_s: float  # short prompts that come in a second


MACHINES = (
    Machine("few CPU cores, 135M model", 0.010, 0.0006, 512, 2.0),
    Machine("few CPU cores, large steps", 0.010, 0.0006, 2_048, 2.0),
    Machine("GPU, 8B model", 0.008, 0.00002, 16_384, 40.0),
)


@dataclass
class Node:
    """Prompts by arrival; `waits` are short ones' times from arrival to their last token."""

    machine: Machine
    size: AdaptiveBound | None
    now: float = 0.0
    num_tokens: int = 0
    waits: list[float] = field(default_factory=list)

    def run(self, seed: int) -> None:
        draw, limits = random.Random(seed), PrefillLimits(self.machine.max_batched_tokens, 16_384, 64, 1)
        scheduler = PrefillScheduler(limits, self.size)
        next_short, number = draw.expovariate(self.machine.short_per_s), 0
        came: dict[JobId, float] = {}  # short ones
        left: dict[JobId, int] = {}
        while self.now < SECONDS:
            num_long = len(left) - len(came)
            arrivals = [(self.now, LONG_TOKENS)] * (NUM_LONG - num_long)
            while next_short <= self.now:
                arrivals.append((next_short, SHORT_TOKENS))
                next_short += draw.expovariate(self.machine.short_per_s)
            for arrived, num_tokens in arrivals:
                job_id, number = JobId(number), number + 1
                scheduler.enqueue(job_id)
                if not scheduler.may_admit(num_tokens):
                    raise RuntimeError("short prompts came faster than they are computed; ask for fewer")
                scheduler.admit(job_id)
                scheduler.start(job_id, num_tokens)
                scheduler.waited(self.now - arrived)
                left[job_id] = num_tokens
                if num_tokens == SHORT_TOKENS:
                    came[job_id] = arrived
            self._step(scheduler, came, left)

    def _step(self, scheduler: PrefillScheduler, came: dict[JobId, float], left: dict[JobId, int]) -> None:
        chunks = scheduler.schedule()
        num_tokens = sum(count for _, count in chunks)
        self.now += self.machine.step_s + self.machine.token_s * num_tokens
        self.num_tokens += num_tokens
        for job_id, count in chunks:
            scheduler.advance(job_id, count)
            left[job_id] -= count
            if not left[job_id]:
                del left[job_id]
                if job_id in came:
                    self.waits.append(self.now - came.pop(job_id))
        scheduler.stepped(num_tokens)


def _line(machine: Machine, size: AdaptiveBound | None, name: str) -> str:
    node = Node(machine, size)
    node.run(seed=1)
    waits = statistics.quantiles(node.waits, n=100)
    bound = machine.max_batched_tokens if size is None else size.of(machine.max_batched_tokens)
    return (
        f"| {machine.name} | {name} | {bound:,} | {waits[49] * 1000:,.0f} / {waits[98] * 1000:,.0f} | "
        f"{node.num_tokens / node.now:,.0f} |"
    )


def main() -> int:
    print("virtual time\n")
    print(f"| machine | steps | tokens of a step at the end | {SHORT_TOKENS} tokens, ms, p50 / p99 | tokens/s in all |")
    print("| --- | --- | --- | --- | --- |")
    for machine in MACHINES:
        print(_line(machine, None, "as long as the limits let them be"))
        print(_line(machine, AdaptiveBound(QueueMarks(), LEAST_STEP_TOKENS), "adapting, 30 and 100 ms"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
