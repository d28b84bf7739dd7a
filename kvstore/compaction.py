"""Writing the LMDB file anew without its free pages: LMDB itself never makes a file smaller."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import islice

import lmdb

from kvstore.directory import COMPACT_DIRECTORY
from kvstore.disk import ENTRIES, DiskFailedError, DiskFullError, DiskTier
from kvstore.environment import open_file
from kvstore.listing import Progress

STEP_BYTES = 16 << 20
MAX_STEP_KEYS = 4_096
SPARE_BYTES = 16 << 20  # left for others on the device


class Compaction:
    """begin, step until it says that all is copied, finish; and close in any case. All block.

    Nobody writes to the tier meanwhile. Reads go on: they wait only while the new file takes the old one's place. A
    process that dies on the way has lost nothing: the old file is whole until then.
    """

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk
        self._path = disk.directory.path / COMPACT_DIRECTORY
        self._env: lmdb.Environment | None = None
        self._copying: Iterator[int] = iter(())
        self._num_done = 0
        self._num_total = 0
        self._freed_bytes = 0

    def progress(self) -> Progress:
        """In bytes of keys and values."""
        return Progress(min(self._num_done, self._num_total), self._num_total, num_freed_bytes=self._freed_bytes)

    def begin(self) -> None:
        """Raises DiskFullError where there is no room for a second file, DiskFailedError."""
        self._num_total = self._disk.used_bytes()
        if not self._disk.may_grow(self._num_total + SPARE_BYTES):
            raise DiskFullError(f"the device has no room for a second file of {self._num_total} bytes")
        try:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path.mkdir()
            self._env = open_file(self._path, self._disk.disk_bytes, disposable=True)
        except (lmdb.Error, OSError) as error:
            raise DiskFailedError(str(error)) from error
        self._copying = self._copy(self._env)

    def step(self) -> bool:
        """Copies some; False once all is copied. Raises DiskFullError, DiskFailedError."""
        try:
            num_bytes = next(self._copying, None)
        except (lmdb.MapFullError, lmdb.DiskError) as error:
            raise DiskFullError(str(error)) from error
        except lmdb.Error as error:
            raise DiskFailedError(str(error)) from error
        self._num_done += num_bytes or 0
        return num_bytes is not None

    def finish(self) -> None:
        """Puts the new file in the old one's place. Raises DiskFailedError."""
        if self._env is None:
            raise DiskFailedError("a compaction that did not begin cannot end")
        before = self._disk.file_bytes()
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            raise DiskFailedError(str(error)) from error
        self._env.close()
        self._env = None
        self._disk.reopen(self._path)
        self._num_done = self._num_total
        self._freed_bytes = max(0, before - self._disk.file_bytes())

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None
        shutil.rmtree(self._path, ignore_errors=True)

    def _copy(self, target: lmdb.Environment) -> Iterator[int]:
        """In the order of the keys, so that the new file's pages are full; yields each step's bytes."""
        yield from self._copy_all(b"", target)
        yield from self._copy_all(ENTRIES, target)

    def _copy_all(self, name: bytes, target: lmdb.Environment) -> Iterator[int]:
        """After all of the unnamed database: to open another one puts its name among that one's keys."""
        database = target.open_db(name or None)
        after: bytes | None = None
        while True:
            with target.begin(write=True, db=database) as txn:
                after, num_bytes = self._copy_some(name, after, txn)
            if after is None:
                return
            yield num_bytes

    def _copy_some(self, name: bytes, after: bytes | None, txn: lmdb.Transaction) -> tuple[bytes | None, int]:
        """The last key copied, None if there was none left; and bytes."""
        last: bytes | None = None
        num_bytes = 0
        for key, value in islice(self._disk.items_after(name, after), MAX_STEP_KEYS):
            txn.put(key, value, append=True)
            last, num_bytes = bytes(key), num_bytes + len(key) + len(value)
            if num_bytes >= STEP_BYTES:
                break
        return last, num_bytes
