"""Which process is at the other end of a loopback connection, as /proc tells (Linux)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")  # gRPC reaches 127.0.0.1 through IPv6 sockets


def socket_inode(local_port: int, remote_port: int) -> int | None:
    """Of the socket with these ports; None when there is none, or none any more. On loopback ports are enough."""
    wanted = (f"{local_port:04X}", f"{remote_port:04X}")
    for table in _TABLES:
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if (fields[1].rpartition(":")[2], fields[2].rpartition(":")[2]) == wanted and fields[9] != "0":
                return int(fields[9])
    return None


def owns_socket(pid: int, inode: int, *, alone: bool = False) -> bool:
    """Whether the process, or (unless `alone`) a descendant of it, has the socket open. False for one that is gone."""
    link = f"socket:[{inode}]"
    for process in [pid] if alone else [pid, *descendants(pid)]:
        with suppress(OSError):
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):
                    if str(descriptor.readlink()) == link:
                        return True
    return False


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                for child in (task / "children").read_text().split():
                    found += [int(child), *descendants(int(child))]
    return found
