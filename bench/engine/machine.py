"""The machine that is measured on: what it is, and whether it has nothing else to do."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

QUIET_SHARE = 0.05
_LOOK_S = 1.0
_IDLE_FIELDS = slice(3, 5)  # of /proc/stat's first line: idle, and waiting for a disk


def wait_until_quiet(say: Callable[[str], None], limit_s: float) -> float:
    """Waits until the CPUs have nothing to do, so long at most; gives the share of them that is busy at the end."""
    deadline = time.monotonic() + limit_s
    while True:
        busy = _busy_share(_LOOK_S)
        if busy <= QUIET_SHARE:
            return busy
        if time.monotonic() >= deadline:
            say(f"the CPUs were {busy:.0%} busy with something else for {limit_s:.0f} s: measuring all the same")
            return busy


def describe() -> dict[str, str]:
    model = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ": unknown")
    memory = next((line for line in _lines("/proc/meminfo") if line.startswith("MemTotal:")), ": unknown")
    return {
        "cpu": model.partition(":")[2].strip(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": memory.partition(":")[2].strip(),
        "python": platform.python_version(),
        "system": platform.release(),
    }


def _busy_share(over_s: float) -> float:
    before = _cpu_times()
    time.sleep(over_s)
    spent = [later - earlier for earlier, later in zip(before, _cpu_times(), strict=True)]
    return 1.0 - sum(spent[_IDLE_FIELDS]) / max(sum(spent), 1)


def _cpu_times() -> list[int]:
    return [int(ticks) for ticks in _lines("/proc/stat")[0].split()[1:9]]


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
