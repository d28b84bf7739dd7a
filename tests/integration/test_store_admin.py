"""What an administrator asks of a store, between real gRPC ends: the service, and the client that speaks to it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest

from kvrelay.errors import DeadlineError, InvalidRequestError, KVRelayError, OverloadedError, UnavailableError
from kvrelay.kv import remote_admin
from kvrelay.kv.frame import FrameKind, block_frame, control_frame, encode
from kvrelay.kv.hashing import ChecksumChain, slab_checksum
from kvrelay.kv.remote_admin import StoreAdmin
from kvrelay.kv.store_messages import (
    BlockReport,
    BlockSelection,
    DeleteReply,
    PutBegin,
    PutReply,
    StoreNamespace,
    StoreReport,
    TenantReport,
    TierReport,
    WorkReport,
)
from kvrelay.pb import decode_pb2, kvstore_pb2
from kvrelay.rpc import convert_kvstore, raw
from kvrelay.rpc.channel import error_from_rpc, open_channel
from kvrelay.types import BlockHash, Tier
from kvstore.block import model_key, namespace_key
from kvstore.listing import Progress
from kvstore.selector import Selector
from tests.support.fake_store import ServedStore, served_store
from tests.support.grpc_ends import serving
from tests.support.store_blocks import hash_of, slab_of

MODEL, OTHER_MODEL, LAYOUT = "ab" * 32, "cd" * 32, "ef" * 32
NAMESPACE = StoreNamespace(MODEL, LAYOUT)
KEY = namespace_key(MODEL, LAYOUT)
OTHER_KEY = namespace_key(OTHER_MODEL, LAYOUT)
SLAB_BYTES = 2_000


async def put(address: str, begin: bytes, numbers: Sequence[int]) -> PutReply:
    chain = ChecksumChain()
    blocks = []
    for index, number in enumerate(numbers):
        slab = slab_of(number, SLAB_BYTES)
        chain.add(slab_checksum(slab))
        blocks.append(encode(block_frame(index, hash_of(number), slab)))
    end = decode_pb2.HandoffEnd(num_blocks=len(numbers), checksum=chain.digest()).SerializeToString()
    frames = [encode(control_frame(FrameKind.BEGIN, begin)), *blocks, encode(control_frame(FrameKind.END, end))]
    async with open_channel(address) as channel:
        try:
            reply = await raw.stream_unary(channel, raw.KV_TRANSFER, "Put")(iter(frames))
        except Exception as error:
            raise error_from_rpc(error) from error  # type: ignore[arg-type]
    wire = kvstore_pb2.PutReply.FromString(reply)
    return PutReply(wire.num_stored, wire.num_present, wire.num_refused)


def begin_of(numbers: Sequence[int], first_index: int = 0, **changes: Any) -> PutBegin:
    """Of a chain in which each of `numbers` follows the one before it, the first one the number below it."""
    parents = tuple(hash_of(number) for number in (numbers[0] - 1, *numbers[:-1]))
    indexes = tuple(range(first_index, first_index + len(numbers)))
    return PutBegin(**{"namespace": NAMESPACE, "parent_hashes": parents, "chain_indexes": indexes, **changes})


def hold_chains(served: ServedStore) -> None:
    """Two chains of one model, of two tenants, and one of another model."""
    served.store.hold(KEY, [1, 2, 3])
    served.store.hold(KEY, [11, 12], root=10, tenant="acme", unused_s=5_000.0, expires_in_s=None)
    served.store.hold(OTHER_KEY, [21], root=20)


async def test_a_put_says_whose_its_blocks_are_how_long_they_stay_and_what_they_follow() -> None:
    async with served_store() as served:
        begin = begin_of([1, 2], tenant="acme", ttl_s=300.0)
        assert await put(served.address, convert_kvstore.put_begin_to_bytes(begin), [1, 2]) == PutReply(2, 0, 0)
        later = begin_of([3, 4], first_index=2, tenant="acme", ttl_s=0.0)
        assert await put(served.address, convert_kvstore.put_begin_to_bytes(later), [3, 4]) == PutReply(2, 0, 0)
        infos = [block.info for block in served.store.held.values()]
    assert [(info.key, info.parent) for info in infos] == [
        (KEY + hash_of(number), KEY + hash_of(number - 1)) for number in (1, 2, 3, 4)
    ]
    assert [info.chain_index for info in infos] == [0, 1, 2, 3]
    assert [info.tenant for info in infos] == ["acme"] * 4
    assert [info.ttl_s for info in infos] == [300.0, 300.0, 0.0, 0.0]


async def test_a_put_that_names_no_time_gets_its_tenants() -> None:
    async with served_store() as served:
        await put(served.address, convert_kvstore.put_begin_to_bytes(begin_of([1])), [1])
        await put(served.address, convert_kvstore.put_begin_to_bytes(begin_of([5], tenant="acme")), [5])
        infos = [block.info for block in served.store.held.values()]
    assert [(info.tenant, info.ttl_s) for info in infos] == [("default", 3_600.0), ("acme", 60.0)]


async def test_a_block_whose_parent_is_not_held_is_refused() -> None:
    async with served_store() as served:
        begin = begin_of([7, 8], first_index=6)
        assert await put(served.address, convert_kvstore.put_begin_to_bytes(begin), [7, 8]) == PutReply(0, 0, 2)
        assert served.store.held == {}


async def test_a_sender_that_knows_no_chains_puts_blocks_that_stand_alone() -> None:
    async with served_store() as served:
        begin = convert_kvstore.put_begin_to_bytes(PutBegin(NAMESPACE))
        assert await put(served.address, begin, [1, 9]) == PutReply(2, 0, 0)
        infos = [block.info for block in served.store.held.values()]
    assert [(info.parent, info.chain_index) for info in infos] == [(KEY + bytes(32), 0)] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tenant": "t" * 65}, "allowed are 1 to 64 printable characters"),
        ({"tenant": "a\nb"}, "allowed are 1 to 64 printable characters"),
        ({"ttl_s": -1.0}, "ttl_s is -1; allowed is a number of seconds of at least 0"),
        ({"ttl_s": math.nan}, "ttl_s is nan"),
        ({"ttl_s": math.inf}, "ttl_s is inf"),
        ({"parent_hashes": (BlockHash(b"short"),)}, "parent_hashes holds one of 5 bytes; each has 32"),
        ({"chain_indexes": (0, 1)}, "parent_hashes has 1 entries and chain_indexes 2"),
        ({"namespace": StoreNamespace("", LAYOUT)}, "model_fingerprint has 0 characters"),
    ],
)
async def test_a_put_that_begins_wrongly_is_refused(changes: dict[str, Any], message: str) -> None:
    async with served_store() as served:
        with pytest.raises(InvalidRequestError, match=message):
            await put(served.address, convert_kvstore.put_begin_to_bytes(begin_of([1], **changes)), [1])
        assert served.store.held == {}


async def test_a_put_of_more_blocks_than_it_names_parents_for_is_refused() -> None:
    async with served_store() as served:
        with pytest.raises(InvalidRequestError, match="BEGIN names 1 parents; block 1 has none"):
            await put(served.address, convert_kvstore.put_begin_to_bytes(begin_of([1])), [1, 2])


async def test_stats() -> None:
    async with served_store() as served, StoreAdmin(served.address) as admin:
        served.store.hold(KEY, [1, 2])
        assert await admin.stats() == StoreReport(
            memory=TierReport(2, 2_000, 8_000, 5, 1),
            disk=TierReport(7, 7_168, 65_536, 3, 2),
            misses=11,
            corrupt=1,
            write_failures=2,
            expired=4,
            num_pinned=0,
            file_bytes=131_072,
            tenants=(TenantReport("acme", 3_000, 4_000, 5_000, 0), TenantReport("default", 1_000, 0, 0, 0)),
            refused=6,
            disk_writing=True,
        )


async def test_a_pin_keeps_what_is_held_and_tells_how_many_that_are() -> None:
    async with served_store() as served, StoreAdmin(served.address) as admin:
        served.store.hold(KEY, [1, 2])
        assert await admin.pin(NAMESPACE, [hash_of(1), hash_of(2), hash_of(3)], 60.0) == 2
        assert (await admin.stats()).num_pinned == 2
        assert await admin.pin(NAMESPACE, [hash_of(1)], 0.0) == 1
        assert (await admin.stats()).num_pinned == 1


@pytest.mark.parametrize("pin_s", [-1.0, 604_801.0, math.inf, math.nan])
async def test_a_pin_has_an_end(pin_s: float) -> None:
    async with served_store() as served, StoreAdmin(served.address) as admin:
        with pytest.raises(InvalidRequestError, match=r"pin_s is .*; allowed is a number of seconds from 0 to 604800"):
            await admin.pin(NAMESPACE, [hash_of(1)], pin_s)


async def test_finding_blocks_one_by_one() -> None:
    async with served_store() as served, StoreAdmin(served.address) as admin:
        served.store.hold(KEY, [2], tier=Tier.DISK)
        assert await admin.find(NAMESPACE, [hash_of(1), hash_of(2)]) == [Tier.NONE, Tier.DISK]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (BlockSelection(tenant="acme"), DeleteReply(2, 2_000)),
        (BlockSelection(model_fingerprint=MODEL), DeleteReply(5, 5_000)),
        (BlockSelection(block_hash=hash_of(2)), DeleteReply(2, 2_000)),
        (BlockSelection(unused_s=100.0), DeleteReply(2, 2_000)),
        (BlockSelection(unused_s=0.0), DeleteReply(6, 6_000)),
        (BlockSelection(tenant="acme", model_fingerprint=OTHER_MODEL), DeleteReply(0, 0)),
    ],
)
async def test_a_delete_drops_what_matches_all_that_it_names(selection: BlockSelection, expected: DeleteReply) -> None:
    async with served_store() as served, StoreAdmin(served.address) as admin:
        hold_chains(served)
        assert await admin.delete(selection) == expected
        assert len(served.store.held) == 6 - expected.num_blocks


async def test_a_delete_by_model_means_all_its_layouts() -> None:
    async with served_store() as served, StoreAdmin(served.address) as admin:
        await admin.delete(BlockSelection("acme", MODEL, bytes(range(32)), 5.0))
    assert served.store.selected == [Selector("acme", model_key(MODEL), bytes(range(32)), 5.0)]
    assert KEY.startswith(model_key(MODEL))


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (BlockSelection(), "a delete needs to say which blocks: set one of"),
        (BlockSelection(block_hash=b"short"), "block_hash has 5 bytes; it has 32"),
        (BlockSelection(unused_s=-1.0), "unused_s is -1"),
        (BlockSelection(unused_s=math.nan), "unused_s is nan"),
        (BlockSelection(tenant="t" * 65), "allowed are 1 to 64 printable characters"),
        (BlockSelection(model_fingerprint="f" * 129), "model_fingerprint has 129 characters"),
    ],
)
async def test_a_delete_that_means_nothing_or_everything_is_refused(selection: BlockSelection, message: str) -> None:
    async with served_store() as served, StoreAdmin(served.address) as admin:
        hold_chains(served)
        with pytest.raises(InvalidRequestError, match=message):
            await admin.delete(selection)
        assert len(served.store.held) == 6


async def test_a_list_tells_all_of_each_block() -> None:
    async with served_store() as served, StoreAdmin(served.address) as admin:
        served.store.hold(KEY, [1], root=7, tenant="acme", tier=Tier.DISK, pinned_s=9.0)
        served.store.hold(KEY, [2], expires_in_s=None)
        listed = [block async for block in admin.list()]
    assert listed == [
        BlockReport(hash_of(1), hash_of(7), 0, KEY.hex(), "acme", Tier.DISK, 1_000, 10.0, 50.0, 9.0),
        BlockReport(hash_of(2), hash_of(0), 0, KEY.hex(), "default", Tier.MEMORY, 1_000, 10.0, None, 0.0),
    ]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [({}, [1, 2, 3, 11, 12, 21]), ({"tenant": "acme"}, [11, 12]), ({"model_fingerprint": OTHER_MODEL}, [21])],
)
async def test_a_list_may_be_of_one_tenant_or_model(asked: dict[str, str], expected: list[int]) -> None:
    async with served_store() as served, StoreAdmin(served.address) as admin:
        hold_chains(served)
        listed = [block.block_hash async for block in admin.list(**asked)]
    assert listed == [hash_of(number) for number in expected]


async def test_a_long_list_comes_in_pages_while_the_store_changes() -> None:
    """2,000 blocks fit no single message of a sensible size; another block goes while they are listed."""
    async with served_store() as served, StoreAdmin(served.address) as admin:
        served.store.hold(KEY, range(2_000))
        hashes = set()
        async with aclosing(admin.list()) as listed:
            async for block in listed:
                hashes.add(block.block_hash)
                served.store.held.pop(KEY + hash_of(1_999), None)
        assert hashes >= {hash_of(number) for number in range(1_999)}


async def test_verify_and_compact_tell_how_far_they_are() -> None:
    async with served_store() as served, StoreAdmin(served.address) as admin:
        assert [work async for work in admin.verify()] == [WorkReport(2, 4, 1), WorkReport(4, 4, 1)]
        assert [work async for work in admin.compact()] == [WorkReport(2, 4), WorkReport(4, 4, num_freed_bytes=4_096)]


async def test_one_long_work_at_a_time_and_then_another_one() -> None:
    async with served_store() as served, StoreAdmin(served.address) as admin:
        served.store.may_work = asyncio.Semaphore(1)
        async with aclosing(admin.verify()) as verifying:
            assert await anext(verifying) == WorkReport(2, 4, 1)
            with pytest.raises(OverloadedError, match="a verify is running in this kvstore; try again when it is done"):
                await anext(admin.compact())
        async with asyncio.timeout(60.0):
            while served.store.num_ended < 1:  # the cancel is on its way
                await asyncio.sleep(0.01)
        served.store.may_work.release()
        served.store.may_work.release()
        assert [work.num_done async for work in admin.compact()] == [2, 4]


async def test_a_compact_that_cannot_be_says_why() -> None:
    async with served_store() as served, StoreAdmin(served.address) as admin:
        served.store.without_disk = True
        with pytest.raises(UnavailableError, match=f"kvstore {served.address}: this kvstore has no disk tier"):
            await anext(admin.compact())


async def test_long_work_ends_when_the_store_drains() -> None:
    async with served_store() as served, StoreAdmin(served.address) as admin:
        served.store.steps = [Progress(1, 3), Progress(2, 3), Progress(3, 3)]
        served.service.draining = True
        verifying = admin.verify()
        assert await anext(verifying) == WorkReport(1, 3)
        with pytest.raises(UnavailableError, match="draining; the work was left as far as it came"):
            await anext(verifying)
        assert served.store.num_ended == 1


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:7400"])
async def test_a_store_that_is_not_there_is_named(address: str) -> None:
    async with StoreAdmin(address) as admin:
        for asked in (admin.stats(), anext(admin.list()), anext(admin.verify())):
            with pytest.raises(UnavailableError, match=f"no kvstore answers at {address}; is it running"):
                await asked


async def test_a_store_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_admin, "WORK_TIMEOUT_S", 0.1)
    async with served_store() as served, StoreAdmin(served.address) as admin:
        served.store.may_work = asyncio.Semaphore(0)
        with pytest.raises(DeadlineError, match=f"nothing came from the kvstore at {served.address} for 0.1 s"):
            await anext(admin.verify())


async def test_what_is_no_kvstore_is_an_error_too() -> None:
    async with serving() as port, StoreAdmin(f"127.0.0.1:{port}") as admin:
        with pytest.raises(KVRelayError):
            await admin.stats()
