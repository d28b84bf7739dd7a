"""What a child process uses of the machine, as Linux tells it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster import RoleProcess

MIB = 2**20


@dataclass(frozen=True, slots=True)
class ProcessUse:
    rss_bytes: int
    num_files: int
    cpu_s: float


def use_of(role: RoleProcess) -> ProcessUse:
    assert role.process is not None
    directory = Path(f"/proc/{role.process.pid}")
    pages = int((directory / "statm").read_text().split()[1])
    fields = (directory / "stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])  # user and system time, the 14th and 15th field of all
    return ProcessUse(
        rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        num_files=len(list((directory / "fd").iterdir())),
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
    )
