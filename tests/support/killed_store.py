"""A process with a store that puts until it is killed; run as a script, it forks one for each line it reads.

Each child says its pid, opens the store, proves every block there and that none is there without its parent, says so,
then puts chains of blocks, waits for the disk, and says which block was the last one that the disk has; every fourth
one also writes its file anew in between.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvstore.disk import DiskTier
from kvstore.listing import HeldBlock
from kvstore.memory import MemoryTier
from kvstore.store import Store
from tests.support.store_blocks import SLAB_BYTES, block_of, hash_of, info_of, key_of

DISK_BYTES = 2 << 20
CHAIN = 5
FLUSH_S = 20.0
# Of one life, more than it will need. No two put the same: a block put again counts as used again, and then new ones
# give way to it.
NUMBERS = 1_001
LIVES = 200


def _say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


def _prove(store: Store, disk: DiskTier, numbers: Mapping[bytes, int]) -> None:
    """Raises AssertionError. Puts are numbered; `numbers` are those of their hashes. Past the store, for which a
    Get would be a use of the block: new ones would then give way to all that were ever proven."""
    held: dict[bytes, HeldBlock] = {one.info.key: one for one in store.list()}
    for key, one in held.items():
        assert one.info.chain_index == 0 or one.info.parent in held, "a block without its parent"
        block = disk.read(key)
        assert block is not None, "a block that the books have is not there"
        assert bytes(block.payload) == block_of(numbers[key[16:]]).payload, "another block's bytes"
    assert store.stats().corrupt == store.stats().wipes == 0, "something did not prove itself"
    _say(f"proven {' '.join(str(numbers[key[16:]]) for key in held)}")


async def _run(path: Path, start: int, numbers: Mapping[bytes, int]) -> None:
    disk = DiskTier(path, DISK_BYTES, "boot", disposable=start % 2 == 1)  # a killed process loses nothing either way
    store = Store(MemoryTier(20 * SLAB_BYTES), disk, asyncio.get_running_loop().time)
    await store.start()
    _prove(store, disk, numbers)
    for first in _chains(start):
        for number in range(first, first + CHAIN):
            after = None if number == first else number - 1
            await store.put(info_of(number, after, number - first), block_of(number))
        await store.flush(FLUSH_S)
        assert store.stats().write_failures == 0, "the disk did not take a block"
        assert disk.read(key_of(first + CHAIN - 1)) is not None, "what was flushed is not on disk"
        _say(f"written {first + CHAIN - 1}")
        if start % 4 == 0:
            async for _ in store.compact():
                pass
    await asyncio.Event().wait()  # whoever kills it is late


def _chains(start: int) -> Iterator[int]:
    """Within the numbers of one life."""
    return iter(range(start, start + NUMBERS - CHAIN + 1, CHAIN))


def main(path: Path) -> None:
    numbers = {hash_of(number): number for number in range(LIVES * NUMBERS)}  # once: each child has it from here
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 1
            _say(f"pid {os.getpid()}")  # not the parent, which may be held up until the child has said more
            try:
                asyncio.run(_run(path, int(line), numbers))
            except AssertionError as error:
                _say(f"wrong {error}")
            finally:
                os._exit(status)
        os.waitpid(child, 0)
        _say("dead")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
