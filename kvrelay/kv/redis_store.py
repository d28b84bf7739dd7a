"""A Redis or Valkey server as the store of KV blocks, for those who run one already.

A block is one value under `kvrelay/<namespace>/<hash>`. It expires by EXPIRE, renewed at every use; what makes room is
the server's affair (`maxmemory` with `allkeys-lru` or `-lfu`), so that a chain may lose any block of it: what follows
is not found again, and ages out. Quotas and pins are the kvstore's own; a tenant's default lifetime is not known here.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence

from kvrelay.errors import ConfigError, CorruptBlockError
from kvrelay.kv import redis_record
from kvrelay.kv.block_store import StoreHealth
from kvrelay.kv.chain import Chain, ChainBlock
from kvrelay.kv.hashing import Buffer, hash_fields
from kvrelay.kv.layout import KVLayout
from kvrelay.types import BlockHash, Tier

NAMESPACE_BYTES = 16
BATCH_BYTES = 4 << 20  # of slabs in one exchange: bounded memory, and a server that is not held up for others

try:
    import redis.asyncio as redis_client
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError
    from redis.retry import Retry
except ModuleNotFoundError:  # an extra that few need
    redis_client = None  # type: ignore[assignment]
    RedisError = OSError  # type: ignore[assignment, misc]

# Of a server that is gone, refuses, or is none: redis-py raises the last two of replies that it cannot make sense of.
FAILURES = (RedisError, OSError, ValueError, TypeError)


class RedisStore(StoreHealth):
    """A `kvrelay.kv.block_store.BlockStore`. Made and used on one event loop.

    `address` is redis://host:port. `timeout_s` bounds connecting and each exchange. Raises ConfigError if redis-py is
    not installed.
    """

    def __init__(self, address: str, layout: KVLayout, model_fingerprint: str, *, timeout_s: float = 2.0) -> None:
        if redis_client is None:
            raise ConfigError(f"{address} needs the Redis client; install it with: pip install 'kvrelay[redis]'")
        super().__init__(address, timeout_s)
        self._slab_bytes = layout.slab_bytes
        self._batch_blocks = max(1, BATCH_BYTES // layout.slab_bytes)
        namespace = hash_fields(b"kvrelay-redis-v1", model_fingerprint.encode(), layout.fingerprint.encode())
        self._prefix = b"kvrelay/%s/" % namespace[:NAMESPACE_BYTES].hex().encode()
        self._redis = redis_client.Redis.from_url(
            address,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),  # whoever asked computes meanwhile
        )

    async def match(self, hashes: Sequence[BlockHash], chain: Chain | None = None) -> list[Tier]:
        held = await self._held(hashes)
        num_leading = held.index(False) if False in held else len(held)
        return [Tier.MEMORY] * num_leading

    async def missing(self, hashes: Sequence[BlockHash], chain: Chain | None = None) -> list[BlockHash]:
        held = await self._held(hashes)
        return [block_hash for block_hash, is_held in zip(hashes, held, strict=False) if not is_held]

    async def get(
        self, hashes: Sequence[BlockHash], chain: Chain | None = None
    ) -> AsyncGenerator[tuple[BlockHash, Buffer, Tier], None]:
        """Proven slabs in order; ends early at the first that the server cannot give."""
        for start in range(0, len(hashes), self._batch_blocks):
            wanted = hashes[start : start + self._batch_blocks]
            found = await self._read(wanted)
            for block_hash, slab in zip(wanted, found, strict=False):
                yield block_hash, slab, Tier.MEMORY
            if len(found) < len(wanted):
                return

    async def put(self, slabs: Sequence[tuple[BlockHash, bytes]], places: Sequence[ChainBlock] = ()) -> int:
        """How many the server did not have; 0 on failure."""
        if not slabs or not self._allowed():
            return 0
        ttl_s = (places[0].chain.ttl_s if places else None) or 0.0
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                for block_hash, slab in slabs:
                    value = redis_record.encode(block_hash, slab, ttl_s)
                    pipe.set(self._prefix + block_hash, value, ex=_whole_seconds(ttl_s), nx=True)
                stored = await pipe.execute()
        except FAILURES as error:
            self._failed(error)
            return 0
        self._succeeded()
        return sum(bool(one) for one in stored)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _held(self, hashes: Sequence[BlockHash]) -> list[bool]:
        """One for each hash; [] on failure."""
        if not hashes or not self._allowed():
            return []
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                for block_hash in hashes:
                    pipe.exists(self._prefix + block_hash)
                held = await pipe.execute()
        except FAILURES as error:
            self._failed(error)
            return []
        self._succeeded()
        return [bool(one) for one in held]

    async def _read(self, hashes: Sequence[BlockHash]) -> list[Buffer]:
        """The slabs up to the first that is not there or not right; their time to live begins anew."""
        if not self._allowed():
            return []
        found: list[redis_record.RedisRecord] = []
        try:
            values = await self._redis.mget([self._prefix + block_hash for block_hash in hashes])
            for block_hash, value in zip(hashes, values, strict=True):
                if not isinstance(value, bytes):
                    break
                found.append(redis_record.decode(value, block_hash, self._slab_bytes))
            await self._renew(hashes, found)
        except CorruptBlockError as error:
            self.num_corrupt += 1
            await self._discard(hashes[len(found)])
            self._failed(error)
        except FAILURES as error:
            self._failed(error)
        else:
            self._succeeded()
        return [record.slab for record in found]

    async def _renew(self, hashes: Sequence[BlockHash], found: Sequence[redis_record.RedisRecord]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for block_hash, record in zip(hashes, found, strict=False):
                lifetime_s = _whole_seconds(record.ttl_s)
                if lifetime_s is not None:
                    pipe.expire(self._prefix + block_hash, lifetime_s)
            if len(pipe):
                await pipe.execute()

    async def _discard(self, block_hash: BlockHash) -> None:
        """A wrong value would else stay, since what is there is not written again."""
        try:
            await self._redis.delete(self._prefix + block_hash)
        except FAILURES as error:
            self._failed(error)


def _whole_seconds(ttl_s: float) -> int | None:
    """As Redis counts; None: no end."""
    return math.ceil(ttl_s) if ttl_s > 0 else None
