"""A file that may be replaced while the process runs: keys, certificates.

It is looked at when what it says is asked for, one `stat` a time, so a change holds from the next call on and nothing
polls. Kubernetes changes a mounted secret by a symbolic link, and that is seen too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from kvrelay.errors import ConfigError

T = TypeVar("T")

logger = logging.getLogger(__name__)

_Look = tuple[tuple[int, int, int] | None, ...]  # of each file: inode, nanoseconds of its last change, bytes


class WatchedFiles(Generic[T]):
    """What `parse` makes of the files' bytes. Raises ConfigError at first, as `parse` may.

    What cannot be read or parsed later leaves what was there in force, and is an error in the log once.
    """

    def __init__(self, paths: Sequence[Path], parse: Callable[..., T]) -> None:
        self._paths = paths
        self._parse = parse
        self._look = _look_at(paths)
        self._value = self._read()
        self.num_changes = 0  # that were read and used

    @property
    def value(self) -> T:
        self.look()
        return self._value

    def look(self) -> None:
        """Reads what changed."""
        look = _look_at(self._paths)
        if look != self._look:
            self._look = look
            self._read_anew()

    def _read_anew(self) -> None:
        names = ", ".join(map(str, self._paths))
        try:
            self._value = self._read()
        except ConfigError as error:
            logger.error("%s changed and cannot be used; what was there before stays in force: %s", names, error)
        else:
            self.num_changes += 1
            logger.info("read %s anew", names)

    def _read(self) -> T:
        return self._parse(*map(_read, self._paths))


def _look_at(paths: Sequence[Path]) -> _Look:
    return tuple(map(_stat, paths))


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
