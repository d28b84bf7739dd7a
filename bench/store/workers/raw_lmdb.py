"""LMDB in this process, used as the store uses it: transactions of 16 MiB, synced but for the meta page, whole pages a
value, read-ahead; a copy of each value inside the read transaction. No header, no checksum."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import lmdb

from bench.store import page_cache
from bench.store.peer import Blocks, serve

BATCH_BYTES = 16 << 20
MAP_BYTES = 4 << 30
PAGE_BYTES, PAGE_HEADER_BYTES = 4_096, 16


def open_environment(path: Path) -> Any:
    return lmdb.open(str(path), map_size=MAP_BYTES, sync=True, metasync=False, readahead=True)


class RawLMDB:
    def __init__(self, task: dict[str, Any], blocks: Blocks) -> None:
        self._path = Path(task["path"])
        self._blocks = blocks
        pages = -(-(blocks.slab_bytes + PAGE_HEADER_BYTES) // PAGE_BYTES)
        padding = bytes(pages * PAGE_BYTES - PAGE_HEADER_BYTES - blocks.slab_bytes)
        self._values = [slab + padding for slab in blocks.slabs]
        self._env = open_environment(self._path)

    def put(self) -> int:
        items = iter(zip(self._blocks.keys, self._values, strict=True))
        while batch := list(islice(items, max(1, BATCH_BYTES // self._blocks.slab_bytes))):
            with self._env.begin(write=True) as txn:
                for key, value in batch:
                    txn.put(key, value)
        return self._blocks.num_bytes

    def get(self) -> int:
        for key, place in zip(self._blocks.keys, self._blocks.places, strict=True):
            with self._env.begin(buffers=True) as txn:
                place[:] = txn.get(key)[: len(place)]
        return self._blocks.num_bytes

    def make_cold(self) -> None:
        self._env.close()
        page_cache.drop(self._path / "data.mdb")
        self._env = open_environment(self._path)


if __name__ == "__main__":
    serve(RawLMDB)
