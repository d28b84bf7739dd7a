"""The kvstore's calls between real gRPC ends, and what nodes see when the store is wrong, slow or gone."""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import cast

import grpc
import pytest

from kvrelay.errors import CorruptBlockError, DeadlineError, InvalidRequestError, KVRelayError, UnavailableError
from kvrelay.kv import frame
from kvrelay.kv.block_store import BlockStore
from kvrelay.kv.chain import Chain, ChainBlock
from kvrelay.kv.frame import FrameKind, block_frame, control_frame, encode
from kvrelay.kv.hashing import ChecksumChain, slab_checksum
from kvrelay.kv.layout import KVLayout
from kvrelay.kv.offload import Offloader
from kvrelay.kv.quiet import Quiet
from kvrelay.kv.remote import StoreClient
from kvrelay.pb import decode_pb2, kvstore_pb2, kvstore_pb2_grpc
from kvrelay.rpc import raw
from kvrelay.rpc.channel import error_from_rpc, open_channel
from kvrelay.types import BlockHash, Tier
from kvstore.block import namespace_key
from kvstore.disk import DiskTier
from kvstore.memory import MemoryTier
from kvstore.service import KVStoreService
from kvstore.store import Store
from tests.support.cluster import free_port
from tests.support.grpc_ends import serving
from tests.support.store_blocks import hash_of, slab_of

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32")
SLAB_BYTES = 8_192
MODEL = "ab" * 32
NAMESPACE = kvstore_pb2.StoreNamespace(model_fingerprint=MODEL, layout_fingerprint=LAYOUT.fingerprint)


def block(number: int) -> tuple[BlockHash, bytes]:
    return hash_of(number), slab_of(number, SLAB_BYTES)


def hashes(*numbers: int) -> list[BlockHash]:
    return [hash_of(number) for number in numbers]


@asynccontextmanager
async def store_at(path: Path | None = None, *, memory_blocks: int = 1_000, port: int = 0) -> AsyncIterator[Served]:
    disk = None if path is None else DiskTier(path, 8 << 20, "boot-1")
    store = Store(MemoryTier(memory_blocks * SLAB_BYTES), disk, lambda: 0.0)
    service = KVStoreService(store)
    await store.start()
    try:
        async with serving(service.register, port=port) as bound:
            yield Served(store, service, bound)
    finally:
        await store.flush(10.0)
        await store.close()


class Served:
    def __init__(self, store: Store, service: KVStoreService, port: int) -> None:
        self.store = store
        self.service = service
        self.port = port
        self.address = f"127.0.0.1:{port}"


@asynccontextmanager
async def client_of(
    address: str, *, layout: KVLayout = LAYOUT, model: str = MODEL, timeout_s: float = 5.0
) -> AsyncIterator[StoreClient]:
    client = StoreClient(address, layout, model, timeout_s=timeout_s)
    try:
        yield client
    finally:
        await client.close()


async def fetch(client: StoreClient, *numbers: int) -> list[Tier]:
    """Tiers of what came, after comparing every byte."""
    tiers: list[Tier] = []
    async with aclosing(client.get(hashes(*numbers))) as found:
        async for block_hash, slab, tier in found:
            assert (block_hash, bytes(slab)) == block(numbers[len(tiers)])
            tiers.append(tier)
    return tiers


async def test_put_then_match_then_get(tmp_path: Path) -> None:
    async with store_at(tmp_path) as served, client_of(served.address) as client:
        assert await client.put([block(1), block(2), block(3)]) == 3
        assert await client.put([block(3), block(4)]) == 1
        assert await client.match(hashes(1, 2, 9, 3)) == [Tier.MEMORY, Tier.MEMORY]
        assert await client.missing(hashes(1, 9, 3, 8)) == hashes(9, 8)
        assert await fetch(client, 1, 2, 3, 4) == [Tier.MEMORY] * 4
        assert client.num_failures == 0


async def test_a_restart_of_the_store_finds_its_blocks_again(tmp_path: Path) -> None:
    async with store_at(tmp_path) as served, client_of(served.address) as client:
        await client.put([block(n) for n in range(10)])
    async with store_at(tmp_path, memory_blocks=4) as served, client_of(served.address) as client:
        assert await client.match(hashes(*range(10))) == [Tier.DISK] * 10
        assert await fetch(client, *range(10)) == [Tier.DISK] * 10


async def test_get_ends_at_the_first_unproven_block(tmp_path: Path) -> None:
    async with store_at(tmp_path) as served, client_of(served.address) as client:
        await client.put([block(1), block(2), block(4)])
        assert await fetch(client, 1, 2, 3, 4) == [Tier.MEMORY] * 2
        assert client.num_failures == 0


async def test_blocks_travel_many_to_a_message() -> None:
    """200 slabs of 8 KiB and their headers: 134 a message, in both directions; the store keeps none of the messages."""
    async with store_at() as served, client_of(served.address) as client:
        put = list(frame.pack(client._put_frames([block(n) for n in range(200)])))
        assert [len(frame.decode(message, max_payload_bytes=SLAB_BYTES)) for message in put] == [135, 67]
        assert await client.put([block(n) for n in range(200)]) == 200
        request = kvstore_pb2.GetRequest(namespace=NAMESPACE, block_hashes=hashes(*range(200)))
        async with grpc.aio.insecure_channel(served.address) as channel:  # with gRPC's own limits
            call = raw.unary_stream(channel, raw.KV_TRANSFER, "Get")(request.SerializeToString())
            got = [message async for message in call]
        assert [len(frame.decode(message, max_payload_bytes=SLAB_BYTES)) for message in got] == [134, 66]
        assert await fetch(client, *range(200)) == [Tier.MEMORY] * 200
        async with aclosing(served.store.get([namespace_key(MODEL, LAYOUT.fingerprint) + hash_of(7)])) as kept:
            async for stored, _ in kept:
                assert isinstance(memoryview(stored.payload).obj, ctypes.Array)  # of the arena, not a message
                assert len(stored.payload) == SLAB_BYTES


async def test_a_foreign_model_or_layout_never_hits() -> None:
    foreign = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32", block_tokens=8)
    async with store_at() as served, client_of(served.address) as client:
        await client.put([block(1)])
        async with client_of(served.address, model="cd" * 32) as other_model:
            assert await other_model.match(hashes(1)) == []
            assert await fetch(other_model, 1) == []
        async with client_of(served.address, layout=foreign) as other_layout:
            assert await other_layout.missing(hashes(1)) == hashes(1)
            assert await fetch(other_layout, 1) == []


async def test_stats_tell_what_happened() -> None:
    async with store_at(memory_blocks=2) as served, client_of(served.address) as client:
        await client.put([block(1), block(2), block(3)])
        await fetch(client, 2, 3)
        await fetch(client, 1)
        await client.match(hashes(2, 3, 1, 4))
        await client.missing(hashes(1, 4))
        async with open_channel(served.address) as channel:
            stats = await kvstore_pb2_grpc.KVStoreStub(channel).Stats(kvstore_pb2.StatsRequest())
        assert (stats.memory.num_blocks, stats.memory.hits, stats.memory.evictions, stats.misses) == (2, 2, 1, 3)
        assert stats.memory.num_bytes == stats.memory.capacity_bytes == 2 * SLAB_BYTES


# What the store does with a wrong stream


def begin() -> bytes:
    return encode(control_frame(FrameKind.BEGIN, kvstore_pb2.PutBegin(namespace=NAMESPACE).SerializeToString()))


def body(index: int, number: int, *, checksum: bytes | None = None) -> bytes:
    return encode(block_frame(index, *block(number), checksum=checksum))


def part(index: int, number: int) -> bytes:
    """The second half of a block."""
    block_hash, slab = block(number)
    return encode(block_frame(index, block_hash, slab[SLAB_BYTES // 2 :], offset_bytes=SLAB_BYTES // 2))


def end(*numbers: int, num_blocks: int | None = None) -> bytes:
    chain = ChecksumChain()
    for number in numbers:
        chain.add(slab_checksum(block(number)[1]))
    count = len(numbers) if num_blocks is None else num_blocks
    return encode(
        control_frame(
            FrameKind.END, decode_pb2.HandoffEnd(num_blocks=count, checksum=chain.digest()).SerializeToString()
        )
    )


async def raw_put(address: str, messages: Sequence[bytes]) -> kvstore_pb2.PutReply:
    async with open_channel(address) as channel:
        try:
            reply = await raw.stream_unary(channel, raw.KV_TRANSFER, "Put")(iter(messages))
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
    return kvstore_pb2.PutReply.FromString(reply)


@pytest.mark.parametrize(
    ("messages", "error", "reason"),
    [
        ([], InvalidRequestError, "without an END"),
        ([begin(), body(0, 1)], InvalidRequestError, "without an END"),
        ([body(0, 1)], InvalidRequestError, "first frame is BLOCK; it must be BEGIN"),
        ([begin(), begin()], InvalidRequestError, "BEGIN 0 came where block 0 or END was due"),
        ([begin(), body(1, 1)], InvalidRequestError, "BLOCK 1 came where block 0"),
        ([begin(), body(0, 1), body(0, 2)], InvalidRequestError, "BLOCK 0 came where block 1"),
        ([begin(), encode(frame.tail_frame(0, 3, b"x"))], InvalidRequestError, "TAIL 0 came"),
        ([begin(), body(0, 1), end(2)], CorruptBlockError, "or of others than the 1 here"),
        ([begin(), body(0, 1), end(1, num_blocks=2)], CorruptBlockError, "END tells of 2 blocks"),
        ([begin(), body(0, 1)[:-1]], CorruptBlockError, "announces 8192 payload bytes and carries 8191"),
        ([begin() + body(0, 1) + end(1) + body(1, 2)], InvalidRequestError, "a BLOCK frame follows END"),
        ([begin() + body(0, 1) + body(0, 2)], InvalidRequestError, "BLOCK 0 came where block 1"),
        ([begin(), part(0, 1)], CorruptBlockError, "block 0: a part from byte 4096 of the slab; whole slabs are due"),
        ([b"nonsense"], CorruptBlockError, "shorter than its header"),
        ([encode(control_frame(FrameKind.BEGIN, b"\xff"))], InvalidRequestError, "no PutBegin"),
        ([encode(control_frame(FrameKind.BEGIN, b""))], InvalidRequestError, "model_fingerprint has 0 characters"),
    ],
)
async def test_a_put_in_disorder_is_refused(messages: list[bytes], error: type[KVRelayError], reason: str) -> None:
    async with store_at() as served:
        with pytest.raises(error, match=reason):
            await raw_put(served.address, messages)


async def test_a_truncated_put_publishes_only_what_is_proven() -> None:
    async with store_at() as served, client_of(served.address) as client:
        with pytest.raises(InvalidRequestError):
            await raw_put(served.address, [begin(), body(0, 1), body(1, 2, checksum=b"?" * 16)])
        assert await client.match(hashes(1)) == [Tier.MEMORY]
        assert await client.missing(hashes(2)) == hashes(2)
        assert await fetch(client, 1) == [Tier.MEMORY]


async def test_a_put_that_says_no_more_is_ended_and_what_came_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.service.PUT_STALL_S", 0.2)

    async def begin_and_stall() -> AsyncIterator[bytes]:
        yield begin()
        yield body(0, 1)
        await asyncio.Event().wait()

    async with store_at() as served, client_of(served.address) as client, open_channel(served.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw.stream_unary(channel, raw.KV_TRANSFER, "Put")(begin_and_stall())
        error = error_from_rpc(caught.value)
        assert isinstance(error, DeadlineError)
        assert error.message == "Put: nothing came for 0.2 s; what came before is kept"
        assert await fetch(client, 1) == [Tier.MEMORY]


async def test_a_corrupt_block_is_refused_and_the_rest_of_the_put_kept() -> None:
    wrong = slab_checksum(b"wrong")
    chain = ChecksumChain()
    for checksum in (slab_checksum(block(1)[1]), wrong, slab_checksum(block(3)[1])):
        chain.add(checksum)
    last = decode_pb2.HandoffEnd(num_blocks=3, checksum=chain.digest()).SerializeToString()
    messages = [begin(), body(0, 1), body(1, 2, checksum=wrong), body(2, 3)]
    async with store_at() as served, client_of(served.address) as client:
        reply = await raw_put(served.address, [*messages, encode(control_frame(FrameKind.END, last))])
        assert (reply.num_stored, reply.num_present, reply.num_refused) == (2, 0, 1)
        assert await client.missing(hashes(1, 2, 3)) == hashes(2)
        assert served.store.stats().corrupt == 1


@pytest.mark.parametrize(
    ("namespace", "block_hashes", "reason"),
    [
        (NAMESPACE, [b"short"], "holds one of 5 bytes; each has 32"),
        (NAMESPACE, [bytes(32)] * 65_537, "has 65537 entries; at most 65536"),
        (kvstore_pb2.StoreNamespace(), [bytes(32)], "model_fingerprint has 0 characters"),
    ],
)
async def test_a_bad_question_is_refused(
    namespace: kvstore_pb2.StoreNamespace, block_hashes: list[bytes], reason: str
) -> None:
    async with store_at() as served, open_channel(served.address) as channel:
        stub = kvstore_pb2_grpc.KVStoreStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match=reason):
            await stub.Match(kvstore_pb2.MatchRequest(namespace=namespace, block_hashes=block_hashes))
        request = kvstore_pb2.GetRequest(namespace=namespace, block_hashes=block_hashes).SerializeToString()
        with pytest.raises(grpc.aio.AioRpcError, match=reason):
            await raw.unary_stream(channel, raw.KV_TRANSFER, "Get")(request).read()


async def test_a_draining_store_serves_but_takes_nothing() -> None:
    async with store_at() as served, client_of(served.address) as client:
        await client.put([block(1)])
        served.service.draining = True
        with pytest.raises(UnavailableError, match="draining"):
            await raw_put(served.address, [begin(), end()])
        assert await fetch(client, 1) == [Tier.MEMORY]


# What a node sees of a wrong store

Answer = Callable[[], Iterator[bytes]]


@asynccontextmanager
async def lying_store(messages: Sequence[bytes], *, hang: bool = False) -> AsyncIterator[str]:
    """Answers every Get with these messages and then ends, or hangs."""

    async def get(request: bytes, context: object) -> AsyncIterator[bytes]:
        for message in messages:
            yield message
        if hang:
            await asyncio.Event().wait()

    handlers = raw.raw_methods(raw.KV_TRANSFER, unary_stream={"Get": get})
    async with serving(lambda server: server.add_generic_rpc_handlers((handlers,))) as port:
        yield f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    "second",
    [
        encode(block_frame(1, hash_of(2), slab_of(2, SLAB_BYTES), checksum=b"?" * 16)),
        encode(block_frame(1, hash_of(3), slab_of(3, SLAB_BYTES))),
        encode(block_frame(0, hash_of(2), slab_of(2, SLAB_BYTES))),
        encode(block_frame(1, hash_of(2), slab_of(2, SLAB_BYTES - 1))),
        encode(block_frame(1, hash_of(2), slab_of(2, SLAB_BYTES + 1))),
        encode(frame.tail_frame(1, 3, slab_of(2, SLAB_BYTES))),
        b"",
    ],
    ids=["checksum", "other-hash", "other-index", "short-slab", "long-slab", "tail", "empty"],
)
async def test_a_store_that_sends_something_else_is_not_believed(second: bytes) -> None:
    async with lying_store([body(0, 1), second]) as address, client_of(address) as client:
        assert await fetch(client, 1, 2) == [Tier.NONE]
        assert (client.num_corrupt, client.num_failures) == (1, 1)


async def test_a_store_that_hangs_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async with lying_store([body(0, 1)], hang=True) as address, client_of(address, timeout_s=1.0) as client:
        assert await fetch(client, 1, 2) == [Tier.NONE]
        assert client.num_failures == 1


@pytest.mark.parametrize("call", ["match", "missing", "put"])
async def test_a_store_that_does_not_answer_a_call_is_given_up(call: str) -> None:
    class HangingStore(kvstore_pb2_grpc.KVStoreServicer):
        async def Match(self, request: kvstore_pb2.MatchRequest, context: object) -> kvstore_pb2.MatchReply:
            await asyncio.Event().wait()
            raise AssertionError

        def register(self, server: grpc.aio.Server) -> None:
            kvstore_pb2_grpc.add_KVStoreServicer_to_server(self, server)
            server.add_generic_rpc_handlers((raw.raw_methods(raw.KV_TRANSFER, stream_unary={"Put": self.put}),))

        async def put(self, messages: AsyncIterator[bytes], context: object) -> bytes:
            await asyncio.Event().wait()
            raise AssertionError

    async with (
        serving(HangingStore().register) as port,
        client_of(f"127.0.0.1:{port}", timeout_s=0.2) as client,
        asyncio.timeout(60.0),
    ):
        ask = {"match": client.match, "missing": client.missing}
        given: object = await (client.put([block(1)]) if call == "put" else ask[call](hashes(1)))
        assert given == (0 if call == "put" else [])
        assert client.num_failures == 1


async def test_a_dead_store_is_a_miss_then_left_alone_then_found_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000.0
    monkeypatch.setattr("kvrelay.kv.block_store.time.monotonic", lambda: now)
    port = free_port()
    async with client_of(f"127.0.0.1:{port}") as client:
        assert await client.match(hashes(1)) == []
        assert await client.put([block(1)]) == 0
        assert await client.match(hashes(1)) == []
        assert await fetch(client, 1) == []
        assert client.num_failures == 2
        assert caplog.text.count("is left alone for a while") == 1
        async with store_at(port=port):
            await client._connection.channel.channel_ready()
            now += 1.5
            assert await client.put([block(1)]) == 1
            assert await fetch(client, 1) == [Tier.MEMORY]


async def test_a_get_that_is_left_early_ends_on_the_server() -> None:
    ended = asyncio.Event()

    async def get(request: bytes, context: object) -> AsyncIterator[bytes]:
        try:
            yield body(0, 1)
            await asyncio.Event().wait()
        finally:
            ended.set()

    handlers = raw.raw_methods(raw.KV_TRANSFER, unary_stream={"Get": get})
    async with serving(lambda server: server.add_generic_rpc_handlers((handlers,))) as port:
        async with client_of(f"127.0.0.1:{port}") as client, aclosing(client.get(hashes(1, 2))) as found:
            await anext(found)
        await asyncio.wait_for(ended.wait(), 30.0)


# Offloading


def chain_of(*numbers: int, chain: Chain | None = None) -> list[ChainBlock]:
    """Blocks of one chain, each the child of the one before it."""
    chain = chain or Chain(hash_of(numbers[0]), "acme", 60.0)
    parents = [BlockHash(b"r" * 32), *hashes(*numbers)]
    return [ChainBlock(hash_of(number), parents[index], index, chain) for index, number in enumerate(numbers)]


async def test_the_offloader_sends_what_the_store_lacks() -> None:
    reads: list[BlockHash] = []
    gone = hash_of(5)

    async def read(block_hash: BlockHash) -> bytes | None:
        reads.append(block_hash)
        return None if block_hash == gone else dict(map(block, range(8)))[block_hash]

    async with store_at() as served, client_of(served.address) as client:
        await client.put([block(0)], chain_of(0))
        offloader = Offloader(client, read, batch_blocks=3)
        await offloader.start()
        offloader.offer(chain_of(*range(8)))
        offloader.offer(chain_of(1, 2))
        await offloader.close()
        assert reads == hashes(1, 2, 3, 4, 5, 6, 7)
        assert await client.missing(hashes(*range(8))) == hashes(5, 6, 7)  # one is gone, and so are its children
        assert (offloader.num_stored, offloader.num_dropped) == (4, 0)


async def test_the_offloader_drops_what_is_beyond_its_bound() -> None:
    async def read(block_hash: BlockHash) -> bytes | None:
        return slab_of(0, SLAB_BYTES)

    async with store_at() as served, client_of(served.address) as client:
        offloader = Offloader(client, read, max_pending_blocks=3)
        offloader.offer(chain_of(1, 2))
        offloader.offer(chain_of(1, 2, 3, 4, 5))
        assert offloader.num_dropped == 2
        await offloader.start()
        await offloader.close()
        assert await client.missing(hashes(1, 2, 3, 4)) == hashes(4)


async def test_the_offloader_outlives_a_read_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    async def read(block_hash: BlockHash) -> bytes | None:
        if block_hash == hash_of(1):
            raise UnavailableError("the engine has stopped")
        return slab_of(2, SLAB_BYTES)

    async with store_at() as served, client_of(served.address) as client:
        offloader = Offloader(client, read)
        await offloader.start()
        offloader.offer(chain_of(1))
        await offloader.flush()
        offloader.offer(chain_of(2))
        await offloader.close()
        assert await client.missing(hashes(1, 2)) == hashes(1)
        assert offloader.num_dropped == 1
        assert [r.levelno for r in caplog.records if r.name == "kvrelay.kv.offload"] == [logging.ERROR]


async def test_the_offloader_gives_up_on_a_store_that_hangs() -> None:
    async def read(block_hash: BlockHash) -> bytes | None:
        await asyncio.Event().wait()
        return None

    async with store_at() as served, client_of(served.address) as client:
        offloader = Offloader(client, read, flush_s=0.05)
        await offloader.start()
        offloader.offer(chain_of(1))
        await offloader.close()
        assert served.store.stats().memory.num_blocks == 0


async def test_the_offloader_tells_the_store_whose_blocks_they_are_and_where_they_stand() -> None:
    begins: list[kvstore_pb2.PutBegin] = []

    class NotingStore(kvstore_pb2_grpc.KVStoreServicer):
        async def Match(self, request: kvstore_pb2.MatchRequest, context: object) -> kvstore_pb2.MatchReply:
            return kvstore_pb2.MatchReply(tiers=[kvstore_pb2.TIER_NONE] * len(request.block_hashes))

        def register(self, server: grpc.aio.Server) -> None:
            kvstore_pb2_grpc.add_KVStoreServicer_to_server(self, server)
            server.add_generic_rpc_handlers((raw.raw_methods(raw.KV_TRANSFER, stream_unary={"Put": self.put}),))

        async def put(self, messages: AsyncIterator[bytes], context: object) -> bytes:
            first = frame.decode(await anext(messages), max_payload_bytes=SLAB_BYTES)[0]
            begins.append(kvstore_pb2.PutBegin.FromString(bytes(first.payload)))
            return kvstore_pb2.PutReply(num_stored=2).SerializeToString()

    async def read(block_hash: BlockHash) -> bytes | None:
        return slab_of(0, SLAB_BYTES)

    async with serving(NotingStore().register) as port, client_of(f"127.0.0.1:{port}") as client:
        offloader = Offloader(client, read)
        offloader.offer(chain_of(1, 2))
        offloader.offer(chain_of(3, 4, chain=Chain(hash_of(3)))[1:])
        await offloader.start()
        await offloader.close()
    assert [(begin.tenant, begin.HasField("ttl_s"), begin.ttl_s) for begin in begins] == [
        ("acme", True, 60.0),
        ("default", False, 0.0),
    ]
    assert [list(begin.parent_hashes) for begin in begins] == [[b"r" * 32, hash_of(1)], [hash_of(3)]]
    assert [list(begin.chain_indexes) for begin in begins] == [[0, 1], [1]]


async def test_a_chain_that_grows_while_its_blocks_wait_goes_to_its_new_home_whole() -> None:
    async def read(block_hash: BlockHash) -> bytes | None:
        return slab_of(0, SLAB_BYTES)

    puts: list[tuple[BlockHash, list[int]]] = []

    class Notes:
        async def missing(self, hashes: Sequence[BlockHash], chain: Chain | None = None) -> list[BlockHash]:
            return list(hashes)

        async def put(self, slabs: Sequence[tuple[BlockHash, bytes]], places: Sequence[ChainBlock] = ()) -> int:
            puts.append((places[0].chain.home, [place.index for place in places]))
            return len(places)

    offloader = Offloader(cast(BlockStore, Notes()), read)
    offloader.offer(chain_of(*range(7), chain=Chain(hash_of(0))))
    offloader.offer(chain_of(*range(8), chain=Chain(hash_of(7))))
    await offloader.start()
    await offloader.close()
    assert puts == [(hash_of(0), list(range(7))), (hash_of(7), list(range(8)))]


@pytest.mark.parametrize("hurry", ["urgent", "crowded", "closing", "quiet"])
async def test_the_offloader_waits_for_quiet_but_not_for_ever(hurry: str) -> None:
    """Its patience is an hour here: only what is urgent, a backlog, the end or quiet itself let it go on."""

    async def read(block_hash: BlockHash) -> bytes | None:
        return slab_of(0, SLAB_BYTES)

    quiet = Quiet()
    quiet.set(False)
    async with store_at() as served, client_of(served.address) as client:
        offloader = Offloader(client, read, quiet=quiet, max_pending_blocks=8, patience_s=3_600.0, flush_s=30.0)
        await offloader.start()
        offloader.offer(chain_of(*range(8) if hurry == "crowded" else (1, 2)), urgent=hurry == "urgent")
        if hurry == "closing":
            await offloader.close()
        else:
            if hurry == "quiet":
                for _ in range(100):
                    await asyncio.sleep(0)
                assert offloader.num_stored == 0
                quiet.set(True)
            await asyncio.wait_for(offloader.flush(), 30.0)
            await offloader.close()
        assert offloader.num_stored >= 2
