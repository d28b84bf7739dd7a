"""What can go wrong with the disk under a store: each has its message and its count, and serving goes on."""

from __future__ import annotations

import os
import random
import resource
from pathlib import Path

import pytest

from kvrelay.errors import ConfigError
from kvrelay.types import Tier
from kvstore.disk import DiskTier
from kvstore.store import PutOutcome, Store
from tests.support.manual_clock import ManualClock
from tests.support.open_store import get, opened, put, put_chain, where
from tests.support.small_device import make_read_only, small_device
from tests.support.store_blocks import SLAB_BYTES, block_of, info_of, key_of

MIB = 1 << 20
FLIP_ROUNDS = 25


async def rightly_served(store: Store, numbers: range) -> int:
    """How many of the blocks are served at all; every byte of those is compared."""
    return sum([len(await get(store, number)) for number in numbers])


def fill(path: Path) -> None:
    """To the last byte of its device."""
    device = os.statvfs(path.parent)
    path.write_bytes(bytes(device.f_bavail * device.f_frsize))


async def test_a_nearly_full_device_is_lived_with(tmp_path: Path) -> None:
    """16 MiB under a file that may reach 64 MiB: old blocks give their pages, and nothing fails."""
    with small_device(tmp_path / "device", 16 * MIB) as device:
        async with opened(device / "store", disk_bytes=64 * MIB, memory_blocks=50) as store:
            await put(store, *range(900))
            fill(device / "others")
            await put(store, *range(1_000, 1_400))
            stats = store.stats()
            assert (stats.write_failures, stats.corrupt) == (0, 0)
            assert await rightly_served(store, range(1_000, 1_400)) > 300


async def test_a_full_device_costs_writes_not_the_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """KS-16, KS-02: not a page is left, so that not even a delete can be written."""
    clock = ManualClock(0.0)
    with small_device(tmp_path / "device", 16 * MIB) as device:
        async with opened(device / "store", disk_bytes=64 * MIB, memory_blocks=50, clock=clock) as store:
            await put(store, *range(100))
            fill(device / "others")
            for number in range(1_000, 1_200):
                clock.now += 1.0
                await put(store, number)
            stats = store.stats()
            assert stats.write_failures > 100
            assert (stats.corrupt, stats.disk_writing) == (0, False)
            assert "stops writing for now, reading goes on" in caplog.text
            assert await get(store, 1_199) == [Tier.MEMORY]
            assert await rightly_served(store, range(100)) > 50
            (device / "others").unlink()
            clock.now += 120.0
            await put(store, 2_000)  # the trial; until it is done others go without the disk
            await put(store, 2_001)
            assert store.stats().disk_writing
            assert caplog.text.count("stops writing for now") == 1
        async with opened(device / "store", disk_bytes=64 * MIB, clock=clock) as store:
            assert await rightly_served(store, range(100)) > 50
            assert await get(store, 2_001) == [Tier.DISK]
            assert store.stats().wipes == 0


async def test_a_store_that_cannot_even_begin_on_a_full_device_says_so(tmp_path: Path) -> None:
    with small_device(tmp_path / "device", MIB) as device:
        fill(device / "others")
        with pytest.raises(ConfigError, match="No space left on device"):
            DiskTier(device / "store", MIB, "boot")


@pytest.mark.parametrize("disposable", [False, True])
async def test_a_restart_on_a_full_device_serves_what_is_there_if_it_is_durable(
    tmp_path: Path, disposable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A disposable store must write down that it is open, or a crash of the machine would not be known."""
    with small_device(tmp_path / "device", 4 * MIB) as device:
        async with opened(device / "store", disposable=disposable) as store:
            await put(store, *range(20))
        fill(device / "others")
        if disposable:
            with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
                DiskTier(device / "store", 8 * MIB, "boot", disposable=True)
            return
        async with opened(device / "store") as store:
            assert "can be read, but not written: No space left on device" in caplog.text
            assert await rightly_served(store, range(20)) == 20
            await put(store, 100)
            assert where(store, 100) == [Tier.MEMORY]
            assert store.stats().write_failures == 1


async def test_a_read_only_file_system_is_named_at_the_start(tmp_path: Path) -> None:
    with small_device(tmp_path / "device", 8 * MIB) as device:
        async with opened(device / "store") as store:
            await put(store, 1)
        make_read_only(device)
        with pytest.raises(ConfigError, match=f"kvstore path {device}/store cannot be used: Read-only file system"):
            DiskTier(device / "store", 8 * MIB, "boot")


def flip(path: Path, choices: random.Random, *, in_trees: bool) -> None:
    """One bit: of any page, or of LMDB's own (branches, leaves and heads of the file), which nothing proves."""
    data = path.read_bytes()
    offset = choices.randrange(len(data))
    if in_trees:
        trees = [
            at for at in range(0, len(data), 4_096) if int.from_bytes(data[at + 10 : at + 12], "little") in (1, 2, 8)
        ]
        offset = choices.choice(trees) + choices.randrange(4_096)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([data[offset] ^ (1 << choices.randrange(8))]))


@pytest.mark.parametrize("in_trees", [False, True])
async def test_bytes_flipped_in_the_file_are_never_served_nor_kill_the_store(
    tmp_path: Path, in_trees: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Damage adds up over the rounds; the store is of use after each of them."""
    choices = random.Random(7)
    num_corrupt = num_wipes = 0
    for flips in range(FLIP_ROUNDS):
        async with opened(tmp_path, memory_blocks=0, disposable=True) as store:
            for _ in range(3):  # damage is found by use, and what was dropped is then put again
                await put_chain(store, *range(60))
                served = await rightly_served(store, range(60))
            assert served == 60, f"round {flips}"
            num_corrupt, num_wipes = num_corrupt + store.stats().corrupt, num_wipes + store.stats().wipes
        for _ in range(1 + flips % 20):
            flip(tmp_path / "data.mdb", choices, in_trees=in_trees)
        async with opened(tmp_path, memory_blocks=0, disposable=True) as store:
            await rightly_served(store, range(60))
            async for progress in store.verify():
                last = progress
            assert last.num_done == last.num_total
            num_corrupt, num_wipes = num_corrupt + store.stats().corrupt, num_wipes + store.stats().wipes
    assert num_corrupt > 0
    assert num_wipes > 0
    assert "starts empty" in caplog.text


async def test_a_flipped_byte_costs_one_block_and_is_mended_by_the_next_put(tmp_path: Path) -> None:
    """PC-13: a poisoned entry can be replaced."""
    async with opened(tmp_path, memory_blocks=0) as store:
        await put(store, *range(20))
    data = bytearray((tmp_path / "data.mdb").read_bytes())
    place = data.index(bytes(block_of(7).payload)[100:200])
    data[place] ^= 1
    (tmp_path / "data.mdb").write_bytes(data)
    async with opened(tmp_path, memory_blocks=0) as store:
        assert await rightly_served(store, range(20)) == 19
        assert store.stats().corrupt == 1
        assert await put(store, 7) == [PutOutcome.STORED]
        assert await get(store, 7) == [Tier.DISK]
        assert store.stats().corrupt == 1


def disk_use(path: Path) -> int:
    """Bytes, as du counts them."""
    return sum(one.stat().st_blocks * 512 for one in path.iterdir())


@pytest.mark.alone
async def test_memory_stays_within_its_bound_while_six_times_as_much_passes(tmp_path: Path) -> None:
    """KS-13: 64 MiB of disk, 16 MiB of memory, 400 MiB of blocks of 1 MiB."""
    slab_bytes, before = MIB, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with opened(tmp_path, memory_blocks=16 * MIB // SLAB_BYTES, disk_bytes=64 * MIB, disposable=True) as store:
        for number in range(400):
            assert await store.put(info_of(number), block_of(number, slab_bytes)) is PutOutcome.STORED
        await store.flush(20.0)
        assert disk_use(tmp_path) <= 64 * MIB * 1.1
        assert store.match([key_of(0)]) == [Tier.NONE]
        assert store.match([key_of(399)]) == [Tier.MEMORY]
        assert store.stats().disk.evictions > 300
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1_024
    assert grown < (16 + 64 + 96 + 64 + 60) * MIB  # memory, its slack, the file's pages, the queue, and a rest
