"""Whether a fault concerns anything, as the system tells."""

from __future__ import annotations

from pathlib import Path

ESTABLISHED = "01"


def is_stopped(pid: int) -> bool:
    """Whether this process was sent SIGSTOP and not yet SIGCONT."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


def num_connections(port: int) -> int:
    """Established ones that this port of this machine has accepted."""
    return sum(is_accepted(line, port) for line in Path("/proc/net/tcp").read_text().splitlines()[1:])


def is_accepted(line: str, port: int) -> bool:
    """`line` of /proc/net/tcp: number, own address, other address, state, and more; in hexadecimal."""
    _, own, _, state, *_ = line.split()
    return state == ESTABLISHED and int(own.rpartition(":")[2], 16) == port
