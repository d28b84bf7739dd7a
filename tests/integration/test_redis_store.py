"""A real Redis server as the store of KV blocks: hits, lifetimes, and values that are not what they should be."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, closing

import pytest

from kvrelay.errors import ConfigError
from kvrelay.kv import redis_record, redis_store
from kvrelay.kv.chain import Chain, ChainBlock
from kvrelay.kv.layout import KVLayout
from kvrelay.kv.offload import Offloader
from kvrelay.kv.open_store import open_store
from kvrelay.kv.redis_store import RedisStore
from kvrelay.kv.remote import StoreClient
from kvrelay.kv.stores import Stores
from kvrelay.types import BlockHash, Tier
from tests.support.redis_server import redis_server
from tests.support.store_blocks import hash_of, slab_of

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32")
MODEL = "ab" * 32


def block(number: int) -> tuple[BlockHash, bytes]:
    return hash_of(number), slab_of(number, LAYOUT.slab_bytes)


def hashes(*numbers: int) -> list[BlockHash]:
    return [hash_of(number) for number in numbers]


def places(*numbers: int, ttl_s: float | None = None) -> list[ChainBlock]:
    chain = Chain(hash_of(numbers[0]), ttl_s=ttl_s)
    parents = [BlockHash(bytes(32)), *hashes(*numbers)]
    return [ChainBlock(hash_of(number), parents[index], index, chain) for index, number in enumerate(numbers)]


@asynccontextmanager
async def opened(address: str, model: str = MODEL, timeout_s: float = 5.0) -> AsyncIterator[RedisStore]:
    store = RedisStore(address, LAYOUT, model, timeout_s=timeout_s)
    try:
        yield store
    finally:
        await store.close()


async def fetch(store: RedisStore, *numbers: int) -> int:
    """How many came, after comparing every byte."""
    num_found = 0
    async with aclosing(store.get(hashes(*numbers))) as found:
        async for block_hash, slab, tier in found:
            assert (block_hash, bytes(slab)) == block(numbers[num_found])
            assert tier is Tier.MEMORY
            num_found += 1
    return num_found


async def keys_of(store: RedisStore) -> list[bytes]:
    return [key async for key in store._redis.scan_iter("*")]


async def test_put_then_match_then_get() -> None:
    async with redis_server() as (address, _), opened(address) as store:
        assert await store.put([block(1), block(2), block(3)]) == 3
        assert await store.put([block(3), block(4)]) == 1
        assert await store.match(hashes(1, 2, 9, 3)) == [Tier.MEMORY] * 2
        assert await store.missing(hashes(1, 9, 3, 8)) == hashes(9, 8)
        assert await fetch(store, 1, 2, 3, 4) == 4
        assert await fetch(store, 4, 2, 9, 1) == 2
        assert (store.num_failures, store.num_corrupt) == (0, 0)


async def test_many_blocks_come_in_several_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "BATCH_BYTES", 3 * LAYOUT.slab_bytes)
    async with redis_server() as (address, _), opened(address) as store:
        await store.put([block(number) for number in range(10)])
        assert await fetch(store, *range(10)) == 10
        assert await fetch(store, *range(8), 77, 9) == 8


async def test_a_foreign_model_never_hits() -> None:
    async with redis_server() as (address, _), opened(address) as store, opened(address, "cd" * 32) as other:
        await store.put([block(1)])
        assert await other.match(hashes(1)) == []
        assert await fetch(other, 1) == 0


async def test_a_time_to_live_begins_anew_at_every_use() -> None:
    async with redis_server() as (address, _), opened(address) as store:
        await store.put([block(1), block(2)], places(1, 2, ttl_s=1_000.5))
        await store.put([block(3)], places(3))
        ttls = [await store._redis.ttl(key) for key in sorted(await keys_of(store))]
        assert sorted(ttls)[0] == -1
        assert 990 <= sorted(ttls)[1] <= sorted(ttls)[2] <= 1_001
        for key in await keys_of(store):
            if await store._redis.ttl(key) > 0:
                await store._redis.expire(key, 10)
        assert await fetch(store, 1, 3) == 2
        ttls = sorted([await store._redis.ttl(key) for key in await keys_of(store)])
        assert ttls[0] == -1
        assert 1 <= ttls[1] <= 10, "block 2 was not used"
        assert 990 <= ttls[2] <= 1_001


def flip(value: bytes) -> bytes:
    return value[:-1] + bytes([value[-1] ^ 1])


WRONG: dict[str, Callable[[bytes], bytes]] = {
    "a bit of the slab": flip,
    "a bit of the header": lambda value: flip(value[:20]) + value[20:],
    "half": lambda value: value[: len(value) // 2],
    "nothing": lambda value: b"",
    "something else": lambda value: b"x" * len(value),
    "another block": lambda value: redis_record.encode(hash_of(9), slab_of(9, LAYOUT.slab_bytes), 0.0),
    "a later version": lambda value: value[:4] + b"\x02" + value[5:],
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_value_that_is_not_the_block_is_a_miss_and_makes_room_for_the_block(wrong: str) -> None:
    async with redis_server() as (address, _), opened(address) as store:
        await store.put([block(1), block(2)])
        key = store._prefix + hash_of(2)
        value = await store._redis.get(key)
        assert isinstance(value, bytes)
        await store._redis.set(key, WRONG[wrong](value))
        assert await fetch(store, 1, 2) == 1
        assert (store.num_corrupt, store.num_failures) == (1, 1)
        assert await store.put([block(2)]) == 1
        assert await fetch(store, 1, 2) == 2


async def test_a_server_that_is_gone_is_a_miss_then_left_alone() -> None:
    async with redis_server() as (address, process), opened(address) as store:
        await store.put([block(1)])
        process.kill()
        await process.wait()
        assert await store.match(hashes(1)) == []
        assert await store.missing(hashes(1)) == []
        assert store.is_blocked
        assert await store.put([block(2)]) == 0
        assert await fetch(store, 1) == 0
        assert store.num_failures == 2


async def test_a_server_that_hangs_is_given_up() -> None:
    async with redis_server() as (address, process), opened(address, timeout_s=1.0) as store:
        await store.put([block(1)])
        process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(60.0):
            assert await fetch(store, 1) == 0
            assert await store.put([block(2)]) == 0
        assert store.num_failures == 2
        process.send_signal(signal.SIGCONT)


async def serve_replies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: bytes) -> None:
    """Speaks as Redis does, but answers every question about values with `reply`."""
    with closing(writer):
        while head := await reader.readline():
            words: list[bytes] = []
            for _ in range(int(head[1:])):
                length = int((await reader.readline())[1:])
                words.append((await reader.readexactly(length + 2))[:length])
            writer.write(reply if words[0] in (b"MGET", b"EXISTS", b"SET") else b"+OK\r\n")


@pytest.mark.parametrize(
    "reply", [b"*0\r\n", b"*-1\r\n", b":7\r\n", b":x\r\n", b"*2\r\n:1\r\n:2\r\n", b"HTTP/1.1 400\r\n"]
)
async def test_a_server_that_makes_no_sense_is_a_miss(reply: bytes) -> None:
    server = await asyncio.start_server(lambda *ends: serve_replies(*ends, reply), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, opened(f"redis://127.0.0.1:{port}", timeout_s=0.5) as store:
        assert await fetch(store, 1, 2) == 0
        await store.match(hashes(1, 2))
        await store.put([block(1)])


async def test_a_get_that_is_given_up_leaves_no_reply_behind_for_the_next() -> None:
    async with redis_server() as (address, process), opened(address) as store:
        await store.put([block(1), block(2)])
        process.send_signal(signal.SIGSTOP)
        waiting = asyncio.create_task(fetch(store, 1))
        await asyncio.sleep(0.05)  # it has asked, or it asks later: both must be right
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        process.send_signal(signal.SIGCONT)
        assert await fetch(store, 2, 1) == 2
        assert store.num_corrupt == 0


async def test_the_offloader_sends_what_redis_lacks() -> None:
    async def read(block_hash: BlockHash) -> bytes | None:
        return dict(map(block, range(8)))[block_hash]

    async with redis_server() as (address, _), opened(address) as store:
        await store.put([block(1)])
        offloader = Offloader(store, read, batch_blocks=3)
        await offloader.start()
        offloader.offer(places(*range(8)))
        await offloader.close()
        assert offloader.num_stored == 7
        assert await fetch(store, *range(8)) == 8


async def test_what_a_node_is_configured_with_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def kinds(addresses: Sequence[str]) -> str:
        return type(open_store(addresses, 1, LAYOUT, MODEL)).__name__

    assert kinds(["127.0.0.1:1"]) == StoreClient.__name__
    assert kinds(["127.0.0.1:1", "127.0.0.1:2"]) == Stores.__name__
    pytest.importorskip("redis", reason="the Redis client is not installed: pip install 'kvrelay[redis]'")
    assert kinds(["redis://127.0.0.1:1"]) == RedisStore.__name__
    monkeypatch.setattr(redis_store, "redis_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvrelay\[redis\]'"):
        kinds(["redis://127.0.0.1:1"])
