"""A process with a store that puts until it is killed; run as a script, it forks one for each line it reads.

Each child opens the store, proves every block there and that none is there without its parent, says so, then puts
chains of blocks, waits for the disk, and says which block was the last one that the disk has; every fourth one also
writes its file anew in between. The line is the number of the first block.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from kvrelay.types import Tier
from kvstore.disk import DiskTier
from kvstore.listing import HeldBlock
from kvstore.memory import MemoryTier
from kvstore.store import Store
from tests.support.store_blocks import SLAB_BYTES, block_of, hash_of, info_of, key_of

DISK_BYTES = 2 << 20
CHAIN = 5
LIFE_BLOCKS = 300  # no two lives put the same block, or an old one would stand for a new one
MAX_LIVES = 200
STEP = LIFE_BLOCKS + 1  # odd, so that every other life is of a disposable store
NUMBERS = {hash_of(number): number for number in range(MAX_LIVES * STEP)}
FLUSH_S = 20.0


def _say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


async def _prove(store: Store) -> None:
    """Raises AssertionError. Puts are numbered, so the number of a hash can be found again."""
    held: dict[bytes, HeldBlock] = {one.info.key: one for one in store.list()}
    for key, one in held.items():
        assert one.info.chain_index == 0 or one.info.parent in held, "a block without its parent"
        async for block, tier in store.get([key]):
            assert tier is Tier.DISK
            assert bytes(block.payload) == block_of(NUMBERS[key[16:]]).payload, "another block's bytes"
    assert store.stats().corrupt == store.stats().wipes == 0, "something did not prove itself"
    _say(f"proven {' '.join(str(NUMBERS[key[16:]]) for key in held)}")


async def _run(path: Path, start: int) -> None:
    disk = DiskTier(path, DISK_BYTES, "boot", disposable=start % 2 == 1)  # a killed process loses nothing either way
    store = Store(MemoryTier(20 * SLAB_BYTES), disk, asyncio.get_running_loop().time)
    await store.start()
    await _prove(store)
    for first in range(start, start + LIFE_BLOCKS, CHAIN):
        for number in range(first, first + CHAIN):
            after = None if number == first else number - 1
            await store.put(info_of(number, after, number - first), block_of(number))
        await store.flush(FLUSH_S)
        assert store.match([key_of(first)]) != [Tier.NONE]
        _say(f"written {first + CHAIN - 1}")
        if start % 4 == 0:
            async for _ in store.compact():
                pass
    await asyncio.Event().wait()  # the end comes from outside


def main(path: Path) -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                asyncio.run(_run(path, int(line)))
            except AssertionError as error:
                _say(f"wrong {error}")
            finally:
                os._exit(status)
        _say(f"pid {child}")
        os.waitpid(child, 0)
        _say("dead")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
