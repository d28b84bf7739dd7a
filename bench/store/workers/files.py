"""One file a block, written with fdatasync, read in one call. No header, no checksum."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bench.store import page_cache
from bench.store.peer import Blocks, serve


class Files:
    def __init__(self, task: dict[str, Any], blocks: Blocks) -> None:
        self._blocks = blocks
        self._paths = [Path(task["path"]) / key.hex() for key in blocks.keys]

    def put(self) -> int:
        for path, slab in zip(self._paths, self._blocks.slabs, strict=True):
            with path.open("wb", buffering=0) as file:
                file.write(slab)
                os.fdatasync(file.fileno())
        return self._blocks.num_bytes

    def get(self) -> int:
        for path, place in zip(self._paths, self._blocks.places, strict=True):
            with path.open("rb", buffering=0) as file:
                file.readinto(place)
        return self._blocks.num_bytes

    def make_cold(self) -> None:
        for path in self._paths:
            page_cache.drop(path)


if __name__ == "__main__":
    serve(Files)
