"""Opening the store's LMDB file: whole and sound, or empty and said so."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import lmdb

from kvrelay.errors import ConfigError
from kvstore import probe
from kvstore.directory import StoreDirectory

MAX_READERS = 126
PROBE_S = 600.0  # a walk of a file that large would be one of ten million blocks on a slow disk

logger = logging.getLogger(__name__)


def open_sound(directory: StoreDirectory, disk_bytes: int, *, disposable: bool) -> lmdb.Environment:
    """Deletes, saying so, what is too large, damaged or not to be walked. Raises ConfigError if nothing can be had."""
    if directory.data_bytes() > disk_bytes:
        directory.wipe(f"its file is larger than the {disk_bytes} bytes allowed now")
    if directory.data_bytes():
        reason = _damage(directory.path, disk_bytes)
        if reason:
            directory.wipe(f"LMDB cannot read it: {reason}")
    try:
        return open_file(directory.path, disk_bytes, disposable=disposable)
    except lmdb.Error as error:
        raise ConfigError(f"kvstore path {directory.path} cannot be used: {error}") from error


def open_file(path: Path, disk_bytes: int, *, disposable: bool) -> lmdb.Environment:
    """With read-ahead, without which cold reads are ten times slower, and without a writable map: a full disk is an
    error of a write then, not the death of the process (SIGBUS). For what is synced see kvstore.directory.

    Raises lmdb.Error.
    """
    return lmdb.open(
        str(path),
        map_size=disk_bytes,
        max_dbs=1,
        sync=not disposable,
        metasync=False,
        writemap=False,
        readahead=True,
        max_readers=MAX_READERS,
    )


def _damage(path: Path, disk_bytes: int) -> str:
    """Why the file cannot be used; "" where it can."""
    command = [sys.executable, probe.__file__, str(path), str(disk_bytes)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROBE_S, check=False, env=environ)
    except subprocess.TimeoutExpired:
        return f"walking it took more than {PROBE_S:g} s"
    if done.returncode < 0:
        return f"walking it kills a process (signal {-done.returncode})"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return "" if done.returncode == 0 else lines[-1] if lines else f"exit {done.returncode}"
