"""An administrator at work on a real store with a disk, which others put to and get from all the while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvrelay.kv.remote_admin import StoreAdmin
from kvrelay.kv.store_messages import BlockSelection, DeleteReply, StoreNamespace, WorkReport
from kvrelay.types import Tier
from kvstore.service import KVStoreService
from kvstore.store import Store
from tests.support.grpc_ends import serving
from tests.support.manual_clock import ManualClock
from tests.support.open_store import get, opened, put_chain, where
from tests.support.store_blocks import SLAB_BYTES, block_of, hash_of, info_of, slab_of

NAMESPACE = StoreNamespace("m" * 64, "l" * 64)  # that of tests.support.store_blocks


@dataclass
class Live:
    store: Store
    admin: StoreAdmin
    clock: ManualClock


@asynccontextmanager
async def live(path: Path, memory_blocks: int = 1_000) -> AsyncIterator[Live]:
    clock = ManualClock(1_000.0)
    async with (
        opened(path, memory_blocks=memory_blocks, clock=clock) as store,
        serving(KVStoreService(store).register) as port,
        StoreAdmin(f"127.0.0.1:{port}") as admin,
    ):
        yield Live(store, admin, clock)


@asynccontextmanager
async def in_use(store: Store) -> AsyncIterator[None]:
    """Chains of 4 blocks are put and read, one after another, for as long as the body runs; every byte is compared."""
    num_rounds = 0

    async def use() -> None:
        nonlocal num_rounds
        while True:
            numbers = range(100_000 + 4 * num_rounds, 100_004 + 4 * num_rounds)
            await put_chain(store, *numbers, flush=False, tenant="busy")
            await get(store, *numbers)
            num_rounds += 1

    using = asyncio.create_task(use())
    try:
        yield
    finally:
        while num_rounds < 2 and not using.done():
            await asyncio.sleep(0)
        using.cancel()
        with suppress(asyncio.CancelledError):
            await using  # raises what it failed with


async def test_a_list_tells_chains_tenants_tiers_and_lives(tmp_path: Path) -> None:
    async with live(tmp_path) as one:
        await put_chain(one.store, 1, 2, 3, tenant="acme", ttl_s=60.0)
        one.clock.now += 10.0
        listed = {block.block_hash: block async for block in one.admin.list("acme")}
        assert {block.chain_index for block in listed.values()} == {0, 1, 2}
        assert listed[hash_of(3)].parent_hash == hash_of(2)
        assert {(block.num_bytes, block.unused_s, block.expires_in_s) for block in listed.values()} == {
            (SLAB_BYTES, 10.0, 50.0)
        }
        stats = await one.admin.stats()
        assert (stats.memory.num_blocks, stats.disk.num_blocks) == (3, 3)
        assert [(tenant.tenant, tenant.memory_bytes) for tenant in stats.tenants] == [("acme", 3 * SLAB_BYTES)]
    async with live(tmp_path) as one:
        assert {block.tier async for block in one.admin.list()} == {Tier.DISK}


async def test_a_pin_outlives_the_time_to_live_and_a_delete_the_pin(tmp_path: Path) -> None:
    async with live(tmp_path) as one:
        await put_chain(one.store, 1, 2, ttl_s=60.0)
        await put_chain(one.store, 11, 12, ttl_s=60.0)
        assert await one.admin.pin(NAMESPACE, [hash_of(2), hash_of(99)], 3_600.0) == 1
        one.clock.now += 120.0
        assert where(one.store, 1, 2, 11, 12) == [Tier.MEMORY, Tier.MEMORY, Tier.NONE, Tier.NONE]
        assert (await one.admin.stats()).num_pinned >= 1
        assert await one.admin.delete(BlockSelection(block_hash=hash_of(1))) == DeleteReply(2, 2 * SLAB_BYTES)
        assert where(one.store, 1, 2) == [Tier.NONE] * 2


async def test_a_delete_by_tenant_leaves_nothing_of_it_in_either_tier(tmp_path: Path) -> None:
    async with live(tmp_path) as one:
        await put_chain(one.store, 1, 2, 3, tenant="acme")
        await put_chain(one.store, 11, 12)
        async with in_use(one.store):
            assert await one.admin.delete(BlockSelection(tenant="acme")) == DeleteReply(3, 3 * SLAB_BYTES)
        assert where(one.store, 1, 2, 3, 11, 12) == [Tier.NONE] * 3 + [Tier.MEMORY] * 2
    async with live(tmp_path) as one:
        assert where(one.store, 1, 2, 3, 11, 12) == [Tier.NONE] * 3 + [Tier.DISK] * 2


async def test_a_delete_by_model_and_by_age(tmp_path: Path) -> None:
    async with live(tmp_path) as one:
        await put_chain(one.store, 1, 2)
        one.clock.now += 100.0
        await put_chain(one.store, 11)
        assert await one.admin.delete(BlockSelection(model_fingerprint="x" * 64)) == DeleteReply(0, 0)
        assert (await one.admin.delete(BlockSelection(unused_s=50.0))).num_blocks == 2
        assert (await one.admin.delete(BlockSelection(model_fingerprint="m" * 64))).num_blocks == 1


async def test_verify_proves_what_is_on_disk_while_it_is_in_use(tmp_path: Path) -> None:
    async with live(tmp_path) as one:
        await put_chain(one.store, *range(40))
        async with in_use(one.store):
            works = [work async for work in one.admin.verify()]
        assert works[-1].num_done == works[-1].num_total >= 40
        assert works[-1].num_corrupt == 0
        assert [work.num_done for work in works] == sorted(work.num_done for work in works)


async def test_verify_drops_what_rotted(tmp_path: Path) -> None:
    async with live(tmp_path) as one:
        await put_chain(one.store, 1, 2, 3)
    file = tmp_path / "data.mdb"
    content = file.read_bytes()
    at = content.index(slab_of(3)[:64])
    file.write_bytes(content[:at] + bytes(64) + content[at + 64 :])
    async with live(tmp_path) as one:
        works = [work async for work in one.admin.verify()]
        assert works[-1] == WorkReport(3, 3, num_corrupt=1)
        assert where(one.store, 1, 2, 3) == [Tier.DISK, Tier.DISK, Tier.NONE]


async def test_compact_makes_the_file_smaller_while_it_is_in_use_and_loses_nothing(tmp_path: Path) -> None:
    async with live(tmp_path, memory_blocks=8) as one:
        await put_chain(one.store, *range(400), tenant="gone")
        await put_chain(one.store, *range(1_000, 1_020))
        await one.admin.delete(BlockSelection(tenant="gone"))
        before = (await one.admin.stats()).file_bytes
        async with in_use(one.store):
            works = [work async for work in one.admin.compact()]
        after = (await one.admin.stats()).file_bytes
        assert works[-1].num_freed_bytes > 0
        assert after < before / 2
        await get(one.store, *range(1_000, 1_020))
        assert Tier.NONE not in where(one.store, *range(1_000, 1_020))


async def test_long_work_that_is_left_early_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    async with live(tmp_path) as one:
        await put_chain(one.store, *range(40))
        for begin in (one.admin.verify, one.admin.compact):
            async with aclosing(begin()) as works:
                await anext(works)
        await put_chain(one.store, 50, 51)
        await get(one.store, *range(40), 50, 51)
    async with live(tmp_path) as one:
        assert where(one.store, *range(40), 50, 51) == [Tier.DISK] * 42


async def test_a_block_is_refused_whose_parent_went_meanwhile(tmp_path: Path) -> None:
    async with live(tmp_path) as one:
        await put_chain(one.store, 1, 2)
        await one.admin.delete(BlockSelection(block_hash=hash_of(2)))
        outcome = await one.store.put(info_of(3, after=2, index=2), block_of(3))
        assert outcome.value == "refused"
        assert where(one.store, 1, 2, 3) == [Tier.MEMORY, Tier.NONE, Tier.NONE]
