"""The store's directory: one process at a time, and whether what lies there can be trusted.

A durable environment syncs each transaction and always can: a crash of the machine loses its last one at most. A
disposable one runs without fsync, for a cache may lose blocks; a killed process loses nothing then either, but a crash
of the machine can leave any page old. So a state file says in which way the environment was open, and whether it was
closed and synced, or under which boot of the machine it was open: a disposable one left open under another boot is
deleted, not read.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from kvrelay.errors import ConfigError

LOCK_FILE = "kvstore.lock"
STATE_FILE = "kvstore.state"
DATA_FILES = ("data.mdb", "lock.mdb")
COMPACT_DIRECTORY = "compact"  # a file written anew, until it takes the place of the other
STATE_VERSION = 2  # of the records, the entries and the state file; another one is not read

logger = logging.getLogger(__name__)


def current_boot_id() -> str:
    """The kernel's id of this boot; "" where there is none, which is never trusted."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class StoreDirectory:
    """Holds the directory from construction to `close`. Raises ConfigError if it cannot be had."""

    def __init__(self, path: Path, boot_id: str, *, disposable: bool = False) -> None:
        self.path = path
        self.num_wipes = 0  # times that what lay here was deleted
        self._boot_id = boot_id
        self._disposable = disposable
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"kvstore path {path} cannot be used: {error.strerror}; choose another") from error
        try:
            self._take_lock()
        except BaseException:
            os.close(self._lock_fd)
            raise

    def open_state(self) -> None:
        """Deletes what cannot be trusted and records that the environment is open under this boot.

        Raises ConfigError when that cannot be recorded; a durable one that was durable before can do without.
        """
        state = self._read_state()
        if not self._trusts(state) and self.data_bytes() > 0:
            self.wipe("it was not closed before the machine went down, or its state or version is unknown")
        shutil.rmtree(self.path / COMPACT_DIRECTORY, ignore_errors=True)
        try:
            self._write_state(clean=False)
        except OSError as error:
            if self._disposable or state.get("durable") is not True:
                raise ConfigError(f"kvstore path {self.path} cannot be written: {error.strerror}") from error
            logger.warning("kvstore at %s can be read, but not written: %s", self.path, error.strerror)

    def wipe(self, reason: str) -> None:
        """Deletes the environment; the caller has it closed."""
        self.num_wipes += 1
        logger.warning("kvstore starts empty at %s: %s", self.path, reason)
        for name in DATA_FILES:
            (self.path / name).unlink(missing_ok=True)

    def replace_data(self, replacement: Path) -> None:
        """Puts a closed, synced environment in the place of the closed one. Raises OSError.

        The old lock file knows the old one's transactions; without it LMDB starts from what the new file says.
        """
        (self.path / DATA_FILES[1]).unlink(missing_ok=True)
        (replacement / DATA_FILES[0]).replace(self.path / DATA_FILES[0])
        self.sync()

    def data_bytes(self) -> int:
        try:
            return (self.path / DATA_FILES[0]).stat().st_size
        except FileNotFoundError:  # not yet, or between a wipe and what comes after it
            return 0

    def close(self, *, clean: bool) -> None:
        """Gives the directory up. `clean`: the environment was synced and closed."""
        try:
            if clean:
                self._write_state(clean=True)
        except OSError as error:
            logger.warning("kvstore at %s will not be trusted after a reboot: %s", self.path, error.strerror)
        finally:
            os.close(self._lock_fd)

    def _trusts(self, state: dict[str, object]) -> bool:
        if not state:
            return False
        same_boot = state.get("boot_id") == self._boot_id != ""
        return state.get("clean") is True or state.get("durable") is True or same_boot

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise ConfigError(
                f"kvstore path {self.path} is in use by another process (pid {holder}); stop it or choose another path"
            ) from error
        with suppress(OSError):  # a full device: whoever comes second is not told which process it was, that is all
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)

    def _read_state(self) -> dict[str, object]:
        """{} if there is none, or none that this version understands."""
        try:
            state = json.loads((self.path / STATE_FILE).read_bytes())
        except (OSError, ValueError):
            return {}
        if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
            return {}
        return state

    def _write_state(self, *, clean: bool) -> None:
        """Durable before it returns: what follows relies on it."""
        state = {
            "version": STATE_VERSION,
            "boot_id": self._boot_id,
            "clean": clean,
            "durable": not self._disposable,
        }
        temporary = self.path / f"{STATE_FILE}.new"
        with temporary.open("wb") as file:
            file.write(json.dumps(state).encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path / STATE_FILE)
        self.sync()

    def sync(self) -> None:
        """Makes what was renamed or deleted in the directory durable. Raises OSError."""
        directory_fd = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(directory_fd)
        finally:
            os.close(directory_fd)
