"""What will be done to the cluster, and when: a pure function of the seed, so that a failure can be run again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvrelay.types import Role

WARM_UP_S = 10.0  # of load alone, before the first fault
CALM_S = 5.0  # of load alone, after the last one
PAUSE_S = (1.5, 5.0)  # between two faults


class Kind(Enum):
    """One way to fail. All but `SLOW` and `TERMINATE` may break calls that are under way."""

    KILL = "kill"  # SIGKILL, then a new process
    TERMINATE = "terminate"  # SIGTERM, a drain, then a new process
    STOP = "stop"  # SIGSTOP, then SIGCONT
    CUT = "cut"  # connections to it end, and new ones are refused
    SILENCE = "silence"  # connections to it stay, and nothing passes
    SLOW = "slow"  # connections to it pass 1 MB/s


# Seconds between the fault and its end, by kind. They lie on both sides of what finds a silent peer (3 to 5 s).
_LASTS_S = {
    Kind.KILL: (0.0, 3.0),
    Kind.TERMINATE: (0.0, 1.0),
    Kind.STOP: (0.3, 8.0),
    Kind.CUT: (0.1, 6.0),
    Kind.SILENCE: (0.3, 8.0),
    Kind.SLOW: (3.0, 8.0),
}


@dataclass(frozen=True, slots=True)
class Victim:
    role: Role
    index: int

    @property
    def name(self) -> str:
        return f"{self.role.value}-{self.index}"


@dataclass(frozen=True, slots=True)
class Fault:
    """`at_s` from the start of the load is the earliest moment: nobody strikes while the victim's twin is down.
    `lasts_s` until the process is started again, goes on, or the link is whole."""

    number: int
    at_s: float
    kind: Kind
    victim: Victim
    lasts_s: float

    def __str__(self) -> str:
        return f"#{self.number} at {self.at_s:.1f} s: {self.kind.value} {self.victim.name} for {self.lasts_s:.1f} s"


def victims(num_of_role: dict[Role, int]) -> tuple[Victim, ...]:
    return tuple(Victim(role, index) for role, count in num_of_role.items() for index in range(count))


def plan_faults(seed: int, seconds: float, kinds: Sequence[Kind], among: Sequence[Victim]) -> tuple[Fault, ...]:
    """Faults of a run of `seconds`. Every kind strikes every role once before any does a second time."""
    draw = random.Random(f"faults {seed}")
    deck: list[tuple[Kind, Role]] = []
    faults: list[Fault] = []
    at_s = WARM_UP_S
    while at_s < seconds - CALM_S:
        if not deck:
            deck = [(kind, role) for kind in kinds for role in dict.fromkeys(victim.role for victim in among)]
            draw.shuffle(deck)
        kind, role = deck.pop()
        victim = draw.choice([victim for victim in among if victim.role is role])
        faults.append(Fault(len(faults), round(at_s, 2), kind, victim, round(draw.uniform(*_LASTS_S[kind]), 2)))
        at_s += draw.uniform(*PAUSE_S)
    return tuple(faults)
