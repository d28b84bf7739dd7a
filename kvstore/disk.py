"""The disk tier's files: an LMDB environment of self-proving records, and an entry beside each.

All calls block. `read` may run on several threads at once; all that writes on one at a time. What is evicted, and
when, is decided elsewhere (kvstore.writer).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import lmdb

from kvrelay.errors import ConfigError, CorruptBlockError
from kvstore import entry, record
from kvstore.block import KEY_BYTES, StoredBlock
from kvstore.directory import StoreDirectory
from kvstore.entry import Entry
from kvstore.environment import open_file, open_sound
from kvstore.gate import Gate

MIN_DISK_BYTES = 1 << 20
# Records of several sizes fragment the file: filled to 80 % it never was full, at 85 % it was (measured).
FILL = 0.8
ENTRIES = b"entries"  # the database beside the unnamed one, which holds the records
DAMAGE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.BadTxnError, lmdb.PageFullError, lmdb.CursorFullError)
_ROOM_KEY = b"room"  # not KEY_BYTES long, so never a block; likewise:
_MARK_KEY = b"clock"

logger = logging.getLogger(__name__)


class DiskFullError(Exception):
    """No pages left, in the file's bound or on the device. What was to be written is not; reading goes on."""


class DiskFailedError(Exception):
    """The environment failed in another way (an I/O error). What was to be written is not."""


Outcome: TypeAlias = StoredBlock | CorruptBlockError | DiskFailedError | None  # of a read; None: it is not here


class DiskDamagedError(DiskFailedError):
    """Pages of the environment's own trees are wrong: no later write would go better."""


@dataclass(frozen=True, slots=True)
class Changes:
    """One transaction, all or nothing: what goes, what comes, whose entry alone is new, and the clock's mark."""

    deletes: Sequence[bytes] = ()
    blocks: Sequence[tuple[Entry, StoredBlock]] = ()
    entries: Sequence[Entry] = ()
    mark: bytes | None = None


@dataclass(frozen=True, slots=True)
class Scan:
    """What an earlier process left. `strays` are keys of records without a sound entry, or the other way round."""

    entries: list[Entry]
    strays: list[bytes]
    mark: bytes | None
    num_corrupt: int  # strays whose entry failed its proof


class DiskTier:
    """`capacity_bytes` of records may be kept in a file that never exceeds `disk_bytes`.

    Durable: an acknowledged write outlives a crash of the machine, but for the last transaction; `disposable`: it
    outlives one of the process. Raises ConfigError if the directory is in use or cannot be used. Starts empty, saying
    so, when what lies there cannot be trusted or is larger than `disk_bytes`.
    """

    def __init__(self, path: Path, disk_bytes: int, boot_id: str, *, disposable: bool = False) -> None:
        self.boot_id = boot_id
        self.disk_bytes = max(disk_bytes, MIN_DISK_BYTES)
        self.capacity_bytes = int(self.disk_bytes * FILL)
        self.disposable = disposable
        self.directory = StoreDirectory(path, boot_id, disposable=disposable)
        self.is_open = True  # False after a failure to open the file again, until the next write has
        self._gate = Gate()  # reads are inside; who opens the file anew is alone
        try:
            self.directory.open_state()
            self._env = open_sound(self.directory, self.disk_bytes, disposable=disposable)
            self._entries = self._env.open_db(ENTRIES)
        except lmdb.Error as error:
            self._env.close()
            self.directory.close(clean=False)
            raise ConfigError(f"kvstore path {path} cannot be written: {error}") from error
        except BaseException:
            self.directory.close(clean=False)
            raise
        self.check_readers()

    @property
    def num_wipes(self) -> int:
        """How often it had to start empty."""
        return self.directory.num_wipes

    def file_bytes(self) -> int:
        return self.directory.data_bytes()

    def scan(self) -> Scan:
        """Reads entries and keys; no slab."""
        with self._env.begin() as txn:
            with txn.cursor() as cursor:
                recorded = {bytes(key) for key in cursor.iternext(values=False) if len(key) == KEY_BYTES}
            with txn.cursor(db=self._entries) as cursor:
                entries, corrupt = _read_entries(cursor)
            known = {one.info.key for one in entries}
            strays = [*corrupt, *(known ^ recorded)]
            return Scan([one for one in entries if one.info.key in recorded], strays, txn.get(_MARK_KEY), len(corrupt))

    def read(self, key: bytes) -> StoredBlock | None:
        """The proven block, a copy of its own; None if it is not here. Raises CorruptBlockError, DiskFailedError."""
        (outcome,) = self.read_many([key])
        if isinstance(outcome, CorruptBlockError | DiskFailedError):
            raise outcome
        return outcome

    def read_many(self, keys: Sequence[bytes]) -> list[Outcome]:
        """As `read`, in one transaction; what it would raise of a block stands in that block's place."""
        try:
            with self._gate.inside(), self._env.begin(buffers=True) as txn:
                return [_copy_proven(key, txn.get(key)) for key in keys]
        except lmdb.Error as error:
            return [DiskFailedError(f"LMDB cannot read: {error}") for _ in keys]

    def write(self, changes: Changes) -> None:
        """Raises DiskFullError, DiskFailedError."""
        self._ensure_open()
        try:
            with self._env.begin(write=True) as txn:
                for key in changes.deletes:
                    txn.delete(key)
                    txn.delete(key, db=self._entries)
                for one, block in changes.blocks:
                    txn.put(one.info.key, record.pack(one.info.key, block))
                for one in [*(one for one, _ in changes.blocks), *changes.entries]:
                    txn.put(one.info.key, entry.pack(one), db=self._entries)
                if changes.mark is not None:
                    txn.put(_MARK_KEY, changes.mark)
        except (lmdb.MapFullError, lmdb.DiskError) as error:
            raise DiskFullError(str(error)) from error
        except lmdb.PanicError as error:
            self.reopen()
            raise DiskFailedError(f"LMDB could not finish a transaction: {error}") from error
        except DAMAGE as error:
            raise DiskDamagedError(f"LMDB's file is damaged: {error}") from error
        except lmdb.Error as error:
            raise DiskFailedError(f"LMDB cannot write: {error}") from error

    def used_bytes(self) -> int:
        """Pages of the file that hold something."""
        info, stat = self._env.info(), self._env.stat()
        with self._env.begin() as txn:
            databases = (stat, txn.stat(self._entries))
        pages = sum(one["branch_pages"] + one["leaf_pages"] + one["overflow_pages"] for one in databases)
        return min(pages, info["last_pgno"] + 1) * int(stat["psize"])

    def items_after(self, name: bytes, after: bytes | None) -> Iterator[tuple[memoryview, memoryview]]:
        """Keys and values of a database (b"": the unnamed one) in order, from the key that follows `after`; views
        that are good for one step. Of the unnamed one, without what LMDB itself keeps there."""
        database = self._entries if name == ENTRIES else None
        with self._gate.inside(), self._env.begin(buffers=True) as txn, txn.cursor(db=database) as cursor:
            there = cursor.first() if after is None else cursor.set_range(after)
            if there and after is not None and bytes(cursor.key()) == after:
                there = cursor.next()
            while there:
                if database is not None or bytes(cursor.key()) != ENTRIES:
                    yield cursor.item()
                there = cursor.next()

    def make_room(self, deletes: Sequence[bytes]) -> None:
        """Deletes blocks so that the next `write` can have their pages. Raises as `write` does.

        LMDB hands out pages freed two transactions ago, hence the tiny one between; a dead reader would pin them.
        """
        self.check_readers()
        self.write(Changes(deletes))
        try:
            with self._env.begin(write=True) as txn:
                txn.put(_ROOM_KEY, b"")
                txn.delete(_ROOM_KEY)
        except lmdb.Error as error:
            raise DiskFullError(str(error)) from error

    def may_grow(self, headroom_bytes: int) -> bool:
        """Whether the device has that much left. Once it has nothing, LMDB cannot even delete: that takes new pages."""
        try:
            device = os.statvfs(self.directory.path)
        except OSError as error:
            raise DiskFailedError(f"cannot look at {self.directory.path}: {error.strerror}") from error
        return device.f_bavail * device.f_frsize >= headroom_bytes

    def check_readers(self) -> None:
        """Clears the slots of readers that were killed, whose snapshots keep pages from being used again."""
        self._ensure_open()
        try:
            num_cleared = self._env.reader_check()
        except lmdb.Error as error:
            raise DiskFailedError(f"LMDB cannot check its readers: {error}") from error
        if num_cleared:
            logger.warning("cleared %d dead LMDB readers", num_cleared)

    def reopen(self, replacement: Path | None = None, *, wipe: str = "") -> None:
        """Opens the file anew, or `replacement` in its place, while nobody reads; an empty one for the reason `wipe`.

        Raises DiskFailedError.
        """
        with self._gate.alone():
            self._env.close()
            self.is_open = False
            try:
                if wipe:
                    self.directory.wipe(wipe)
                if replacement is not None:
                    self.directory.replace_data(replacement)
                self._env = open_file(self.directory.path, self.disk_bytes, disposable=self.disposable)
                self._entries = self._env.open_db(ENTRIES)
                self.is_open = True
            except (lmdb.Error, OSError) as error:
                raise DiskFailedError(f"LMDB cannot open its file again: {error}") from error

    def _ensure_open(self) -> None:
        if not self.is_open:
            self.reopen()

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
            self.directory.close(clean=clean)


def _copy_proven(key: bytes, value: memoryview | None) -> Outcome:
    """Proven where it lies, without the interpreter's lock: the copy then waits for no page."""
    if value is None:
        return None
    try:
        block = record.unpack(key, value)
        block.verify()
    except CorruptBlockError as error:
        return error
    return StoredBlock(bytes(block.payload), block.checksum)


def _read_entries(cursor: Iterable[tuple[bytes, bytes]]) -> tuple[list[Entry], list[bytes]]:
    """Those that prove themselves; keys of the others."""
    entries: list[Entry] = []
    corrupt: list[bytes] = []
    for key, value in cursor:
        try:
            entries.append(entry.unpack(bytes(key), bytes(value)))
        except CorruptBlockError as error:
            logger.warning("kvstore drops a block on disk: %s", error)
            corrupt.append(bytes(key))
    return entries, corrupt
