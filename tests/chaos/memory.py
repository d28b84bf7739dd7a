"""How much memory each process has taken, and whether that has grown."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from kvrelay.types import Role
from tests.chaos.plan import Victim

WARM_AFTER_S = 8.0  # of a process's life; the most it takes from then to the middle of its life is its level
LEAST_LIFE_S = 24.0  # that a level can be told of
ALLOWED_SHARE = 0.10  # over its level at the end, beside the bytes below
_ALLOWED_MIB = {Role.PREFILL_NODE: 64, Role.DECODE_NODE: 64}  # torch's heap grows for minutes, ever more slowly
_ALLOWED_MIB_OTHERS = 16


@dataclass(frozen=True, slots=True)
class Sample:
    age_s: float  # since the process started
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one process: its level once warm (None: no process in its place lived long enough) and at the end."""

    victim: Victim
    warm_bytes: int | None
    end_bytes: int

    @property
    def allowed_bytes(self) -> float:
        allowed_mib = _ALLOWED_MIB.get(self.victim.role, _ALLOWED_MIB_OTHERS)
        return (self.warm_bytes or 0) * (1 + ALLOWED_SHARE) + allowed_mib * 2**20

    @property
    def is_bounded(self) -> bool:
        return self.warm_bytes is None or self.end_bytes <= self.allowed_bytes


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
    """The most it took between being warm and the middle of its life; None when it was not watched long enough."""
    if not samples or samples[-1].age_s < LEAST_LIFE_S:
        return None
    middle_s = samples[-1].age_s / 2
    return max(sample.rss_bytes for sample in samples if WARM_AFTER_S <= sample.age_s <= middle_s)
