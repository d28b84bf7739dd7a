"""Stands in for a role under the launcher: says READY, then waits for SIGTERM.

Called as `launched_role.py DIRECTORY ROLE FLAGS...`. Files in DIRECTORY tell it what to be: `ROLE.dies` (exits with
status 3 before it is ready), `ROLE.silent` (never ready), `ROLE.stubborn` (ignores SIGTERM). It appends one line to
`events` when it is ready and when it ends, and writes its flags to `PORT.flags`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main(directory: Path, role: str, flags: list[str]) -> int:
    port = flags[flags.index("--port") + 1]
    (directory / f"{port}.flags").write_text("\n".join(flags))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    sys.stderr.write("loading weights\n")
    if (directory / f"{role}.dies").exists():
        sys.stderr.write("CUDA is on fire\n")
        return 3
    if not (directory / f"{role}.silent").exists():
        note(directory, f"ready {role} {os.getpid()}")
        sys.stdout.write(f"READY {role} 127.0.0.1:{port}\n")
        sys.stdout.flush()
    while signal.sigwait({signal.SIGTERM}):
        if not (directory / f"{role}.stubborn").exists():
            break
    note(directory, f"ended {role} {os.getpid()}")
    return 0


def note(directory: Path, line: str) -> None:
    with (directory / "events").open("a") as events:
        events.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
