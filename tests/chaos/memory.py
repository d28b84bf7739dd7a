"""How much memory each process has taken, and whether that has grown."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.plan import Victim

WARM_AFTER_S = 8.0  # of a process's life under load; what it takes in the next seconds is its level
WARM_FOR_S = 8.0
ALLOWED_BYTES = 32 * 2**20  # over its level at the end, beside ALLOWED_SHARE of it
ALLOWED_SHARE = 0.10


@dataclass(frozen=True, slots=True)
class Sample:
    age_s: float  # since the process started
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one role: its level once warm (None: no process of it lived that long) and at the end."""

    victim: Victim
    warm_bytes: int | None
    end_bytes: int

    @property
    def is_bounded(self) -> bool:
        return self.warm_bytes is None or self.end_bytes <= self.warm_bytes * (1 + ALLOWED_SHARE) + ALLOWED_BYTES


def rss_bytes(pid: int) -> int | None:
    """None of a process that is gone."""
    try:
        found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


class MemoryWatch:
    """Samples by process; moments are of one clock."""

    def __init__(self) -> None:
        self._samples: defaultdict[Victim, dict[int, list[Sample]]] = defaultdict(dict)
        self._started_at: dict[int, float] = {}

    def sample(self, victim: Victim, pid: int, now: float) -> None:
        rss = rss_bytes(pid)
        if rss is None:
            return
        started_at = self._started_at.setdefault(pid, now)
        self._samples[victim].setdefault(pid, []).append(Sample(now - started_at, rss))

    def growth(self, victim: Victim, pid: int) -> Growth:
        """Of the process that runs at the end, against its own level; one too young for that, against that of the
        role's process before it."""
        samples = self._samples[victim]
        own = warm_level(samples[pid])
        levels = [level for one in samples.values() if (level := warm_level(one)) is not None]
        return Growth(victim, own if own is not None else max(levels, default=None), samples[pid][-1].rss_bytes)

    def peak(self, victim: Victim) -> int:
        return max(sample.rss_bytes for one in self._samples[victim].values() for sample in one)


def warm_level(samples: list[Sample]) -> int | None:
    """The most it took in its first seconds of being warm; None when it was not watched through them."""
    if not samples or samples[-1].age_s < WARM_AFTER_S + WARM_FOR_S:
        return None
    return max(
        (sample.rss_bytes for sample in samples if WARM_AFTER_S <= sample.age_s <= WARM_AFTER_S + WARM_FOR_S),
        default=None,
    )
