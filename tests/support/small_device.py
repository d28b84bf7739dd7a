"""A file system of a few MiB of its own, where this process may mount one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_device(path: Path, num_bytes: int) -> Iterator[Path]:
    """Skips the test where mounting is not allowed."""
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def make_read_only(path: Path) -> None:
    """Nothing there may be open for writing."""
    subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True, capture_output=True)
