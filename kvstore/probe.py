"""Walks an LMDB file in a process of its own, which may die of it: `python probe.py PATH MAP_BYTES`.

LMDB has no checksums of its pages. One that was damaged while nobody looked can crash whoever follows it, so somebody
who is not missed goes first. Needs LMDB alone: it runs as a script, by path.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import lmdb


def probe(path: str, map_bytes: int) -> int:
    """Looks at every key and its place, and at free pages; changes nothing. How many keys there are."""
    num_keys = 0
    with lmdb.open(path, map_size=map_bytes, max_dbs=1, sync=False, metasync=False, create=False) as env:
        if (env.info()["last_pgno"] + 1) * env.stat()["psize"] > os.path.getsize(os.path.join(path, "data.mdb")):
            raise lmdb.CorruptedError("the file is truncated")
        with env.begin(buffers=True) as txn:
            databases = [None, env.open_db(b"entries", txn=txn, create=False)] if txn.get(b"entries") else [None]
            for database in databases:
                with txn.cursor(db=database) as cursor:
                    num_keys += _walk(cursor)
        _look_at_free_pages(env)
    return num_keys


def _walk(cursor: lmdb.Cursor) -> int:
    """Where each value lies is looked up too, but not what is there: that would be a read from disk for each."""
    num_keys, last = 0, b""
    for key, _ in cursor:
        here = bytes(key)
        if here <= last:
            raise lmdb.CorruptedError("keys are out of order")
        num_keys, last = num_keys + 1, here
    return num_keys


def _look_at_free_pages(env: lmdb.Environment) -> None:
    """By a transaction that asks for some, and is undone."""
    with env.begin(write=True) as txn:
        with suppress(lmdb.MapFullError):  # a full file is sound
            txn.put(b"probe", bytes(8_192))
        txn.abort()


if __name__ == "__main__":
    probe(sys.argv[1], int(sys.argv[2]))
