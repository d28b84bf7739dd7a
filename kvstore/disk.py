"""The disk tier's files: an LMDB environment of self-proving records.

All calls block. `read` may run on several threads at once; `write`, `make_room` and `close` on one at a time. What
is evicted, and when, is decided elsewhere (kvstore.writer).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import lmdb

from kvstore import record
from kvstore.block import KEY_BYTES, StoredBlock
from kvstore.directory import StoreDirectory

MIN_DISK_BYTES = 1 << 20
# Records of several sizes fragment the file: filled to 80 % it never was full, at 85 % it was (measured).
FILL = 0.8
MAX_READERS = 126
_ROOM_KEY = b"room"  # not KEY_BYTES long, so never a block

logger = logging.getLogger(__name__)


class DiskFullError(Exception):
    """No pages left, in the file's bound or on the device. What was to be written is not; reading goes on."""


class DiskFailedError(Exception):
    """The environment failed in another way (an I/O error). What was to be written is not."""


class DiskTier:
    """`capacity_bytes` of records may be kept in a file that never exceeds `disk_bytes`.

    Raises ConfigError if the directory is in use or cannot be used. Starts empty, saying so, when what lies there
    cannot be trusted or is larger than `disk_bytes`.
    """

    def __init__(self, path: Path, disk_bytes: int, boot_id: str) -> None:
        self.disk_bytes = max(disk_bytes, MIN_DISK_BYTES)
        self.capacity_bytes = int(self.disk_bytes * FILL)
        self._directory = StoreDirectory(path, boot_id)
        try:
            self._directory.open_state()
            self._env = self._open()
        except BaseException:
            self._directory.close(clean=False)
            raise
        self.check_readers()

    def scan(self) -> list[tuple[bytes, int]]:
        """Keys that are here with their records' sizes; reads no slab."""
        with self._env.begin(buffers=True) as txn, txn.cursor() as cursor:
            return [
                (bytes(key), len(value) + record.PAGE_HEADER_BYTES) for key, value in cursor if len(key) == KEY_BYTES
            ]

    def read(self, key: bytes) -> StoredBlock | None:
        """The proven block, a copy of its own; None if it is not here. Raises CorruptBlockError, DiskFailedError."""
        try:
            with self._env.begin(buffers=True) as txn:
                value = txn.get(key)
                block = None if value is None else record.unpack(key, value)
        except lmdb.Error as error:
            raise DiskFailedError(f"LMDB cannot read: {error}") from error
        if block is not None:
            block.verify()
        return block

    def write(self, deletes: Sequence[bytes], blocks: Sequence[tuple[bytes, StoredBlock]]) -> None:
        """One transaction: all or nothing. Raises DiskFullError, DiskFailedError."""
        try:
            with self._env.begin(write=True) as txn:
                for key in deletes:
                    txn.delete(key)
                for key, block in blocks:
                    txn.put(key, record.pack(key, block))
        except (lmdb.MapFullError, lmdb.DiskError) as error:
            raise DiskFullError(str(error)) from error
        except lmdb.Error as error:
            raise DiskFailedError(f"LMDB cannot write: {error}") from error

    def make_room(self, deletes: Sequence[bytes]) -> None:
        """Deletes blocks so that the next `write` can have their pages. Raises as `write` does.

        LMDB hands out pages freed two transactions ago, hence the tiny one between; a dead reader would pin them.
        """
        self.check_readers()
        self.write(deletes, ())
        try:
            with self._env.begin(write=True) as txn:
                txn.put(_ROOM_KEY, b"")
                txn.delete(_ROOM_KEY)
        except lmdb.Error as error:
            raise DiskFullError(str(error)) from error

    def may_grow(self, headroom_bytes: int) -> bool:
        """Whether the device has that much left. Once it has nothing, LMDB cannot even delete: that takes new pages."""
        try:
            device = os.statvfs(self._directory.path)
        except OSError as error:
            raise DiskFailedError(f"cannot look at {self._directory.path}: {error.strerror}") from error
        return device.f_bavail * device.f_frsize >= headroom_bytes

    def check_readers(self) -> None:
        """Clears the slots of readers that were killed, whose snapshots keep pages from being used again."""
        try:
            num_cleared = self._env.reader_check()
        except lmdb.Error as error:
            raise DiskFailedError(f"LMDB cannot check its readers: {error}") from error
        if num_cleared:
            logger.warning("cleared %d dead LMDB readers", num_cleared)

    def close(self) -> None:
        """Syncs, so that the blocks survive the machine too, and gives the directory up."""
        clean = False
        try:
            self._env.sync(True)
            clean = True
        except lmdb.Error as error:
            logger.warning("LMDB cannot sync: %s", error)
        finally:
            self._env.close()
            self._directory.close(clean=clean)

    def _open(self) -> lmdb.Environment:
        if self._directory.data_bytes() > self.disk_bytes:
            self._directory.wipe(f"its file is larger than the {self.disk_bytes} bytes allowed now")
        env = self._open_env()
        try:
            self._check(env)
        except lmdb.Error as error:
            env.close()
            self._directory.wipe(f"LMDB cannot read it: {error}")
            env = self._open_env()
        return env

    def _check(self, env: lmdb.Environment) -> None:
        """Walks the keys: what is damaged is found now, not by a request. Raises lmdb.Error."""
        if (env.info()["last_pgno"] + 1) * env.stat()["psize"] > self._directory.data_bytes():
            raise lmdb.CorruptedError("the file is truncated")
        with env.begin() as txn, txn.cursor() as cursor:
            for _ in cursor.iternext(values=False):
                pass

    def _open_env(self) -> lmdb.Environment:
        """Starts empty where LMDB refuses the file."""
        try:
            return self._open_file()
        except lmdb.Error as error:
            self._directory.wipe(f"LMDB cannot open it: {error}")
            return self._open_file()

    def _open_file(self) -> lmdb.Environment:
        """No fsync: see kvstore.directory. Read-ahead, without which cold reads are ten times slower."""
        return lmdb.open(
            str(self._directory.path),
            map_size=self.disk_bytes,
            sync=False,
            metasync=False,
            readahead=True,
            max_readers=MAX_READERS,
        )
