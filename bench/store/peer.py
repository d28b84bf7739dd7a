"""The workers of what the store is compared with: each puts the same blocks and gets them back into one memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from bench.handoff.conversation import Conversation
from bench.handoff.transfers import allocate
from bench.store.rate import blocking_rate_of
from bench.store.shapes import random_slab

KEY_BYTES = 48  # as the store's


class Peer(Protocol):
    def put(self) -> int:
        """Writes every block, over what it wrote before, to where the store would have it; gives the bytes."""
        ...

    def get(self) -> int:
        """Copies every block into the memory; gives the bytes."""
        ...

    def make_cold(self) -> None:
        """Takes what was put out of the page cache."""
        ...


class Blocks:
    """`slabs` are what is put, `places` where each belongs when it is got: parts of one memory, as a pool's."""

    def __init__(self, num_blocks: int, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self.num_bytes = num_blocks * slab_bytes
        self.keys = [random_slab(KEY_BYTES) for _ in range(num_blocks)]
        self.slabs = [random_slab(slab_bytes) for _ in range(num_blocks)]
        memory = memoryview(allocate(self.num_bytes))
        self.places = [memory[start : start + slab_bytes] for start in range(0, self.num_bytes, slab_bytes)]

    def check(self) -> None:
        """Raises AssertionError unless the last get brought what the last put took."""
        if any(place != slab for place, slab in zip(self.places, self.slabs, strict=True)):
            raise AssertionError("other bytes came back than were put")


def serve(make: Callable[[dict[str, Any], Blocks], Peer]) -> None:
    """A worker's whole life."""
    driver = Conversation()
    task = driver.task
    blocks = Blocks(task["num_blocks"], task["slab_bytes"])
    peer = make(task, blocks)
    driver.tell(ready=True)
    while order := driver.next_order():
        driver.tell(bytes_per_s=_obey(order, peer))
        if order["do"] != "put":
            blocks.check()


def _obey(order: dict[str, Any], peer: Peer) -> float:
    if order["do"] != "get-cold":
        return blocking_rate_of(peer.put if order["do"] == "put" else peer.get, order["seconds"])
    peer.make_cold()
    started = time.perf_counter()
    return peer.get() / (time.perf_counter() - started)
