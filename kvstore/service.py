"""The store's calls: Get and Put as raw frames (docs/wire.md), the others as protobuf."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from kvrelay.errors import DeadlineError, InvalidRequestError, OverloadedError, UnavailableError
from kvrelay.kv import frame
from kvrelay.pb import kvstore_pb2, kvstore_pb2_grpc
from kvrelay.rpc import convert_kvstore, convert_types, raw
from kvrelay.rpc.channel import MAX_MESSAGE_BYTES
from kvrelay.types import BlockHash
from kvstore import reports
from kvstore.block import StoredBlock, namespace_key
from kvstore.listing import Progress
from kvstore.put_stream import PutStream
from kvstore.store import Store

MAX_SLAB_BYTES = MAX_MESSAGE_BYTES - frame.HEADER_BYTES
LIST_PAGE = 256  # blocks a message
PUT_STALL_S = 30.0  # for a sender's next message, while it may be held up by a slow disk of its own

Context = grpc.aio.ServicerContext[Any, Any]


class KVStoreService(kvstore_pb2_grpc.KVStoreServicer):
    """`draining`: Put is refused and long work ends; what is held is served to the end."""

    def __init__(self, store: Store) -> None:
        self.draining = False
        self._store = store
        self._long_work = ""  # what runs

    def register(self, server: grpc.aio.Server) -> None:
        kvstore_pb2_grpc.add_KVStoreServicer_to_server(self, server)
        transfer = raw.raw_methods(raw.KV_TRANSFER, unary_stream={"Get": self.get}, stream_unary={"Put": self.put})
        server.add_generic_rpc_handlers((transfer,))

    async def Match(self, request: kvstore_pb2.MatchRequest, context: Context) -> kvstore_pb2.MatchReply:
        keys = _keys(request.namespace, request.block_hashes)
        tiers = self._store.match(keys) if request.each else self._store.match_prefix(keys)
        return kvstore_pb2.MatchReply(tiers=[convert_kvstore.tier_to_pb(tier) for tier in tiers])

    async def Stats(self, request: kvstore_pb2.StatsRequest, context: Context) -> kvstore_pb2.StatsReply:
        return convert_kvstore.store_report_to_pb(reports.store_report(self._store.stats()))

    async def Pin(self, request: kvstore_pb2.PinRequest, context: Context) -> kvstore_pb2.PinReply:
        keys = _keys(request.namespace, request.block_hashes)
        num_blocks = self._store.pin(keys, convert_kvstore.pin_s_from_pb(request.pin_s))
        return kvstore_pb2.PinReply(num_blocks=num_blocks)

    async def Delete(self, request: kvstore_pb2.DeleteRequest, context: Context) -> kvstore_pb2.DeleteReply:
        selector = reports.selector(convert_kvstore.delete_request_from_pb(request))
        num_blocks, num_bytes = await self._store.delete(selector)
        return kvstore_pb2.DeleteReply(num_blocks=num_blocks, num_bytes=num_bytes)

    async def List(self, request: kvstore_pb2.ListRequest, context: Context) -> AsyncIterator[kvstore_pb2.ListReply]:
        held = self._store.list(request.tenant, reports.model_prefix(request.model_fingerprint))
        for page in _pages(held):
            yield convert_kvstore.list_reply_to_pb(map(reports.block_report, page))

    async def Verify(
        self, request: kvstore_pb2.VerifyRequest, context: Context
    ) -> AsyncIterator[kvstore_pb2.VerifyReply]:
        with self._only("verify"):
            async for progress in self._until_drained(self._store.verify()):
                yield convert_kvstore.verify_reply_to_pb(reports.work_report(progress))

    async def Compact(
        self, request: kvstore_pb2.CompactRequest, context: Context
    ) -> AsyncIterator[kvstore_pb2.CompactReply]:
        with self._only("compact"):
            async for progress in self._until_drained(self._store.compact()):
                yield convert_kvstore.compact_reply_to_pb(reports.work_report(progress))

    async def get(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        """Frames of the blocks asked for, in order; the stream ends before the first that is not proven."""
        wire = convert_types.parse(kvstore_pb2.GetRequest, request)
        packer, index = frame.Packer(), 0
        async with aclosing(self._store.get(_keys(wire.namespace, wire.block_hashes))) as found:
            async for block, tier in found:
                block_hash = BlockHash(wire.block_hashes[index])
                message = packer.add(frame.block_frame(index, block_hash, block.payload, block.checksum, tier))
                if message is not None:
                    yield message
                index += 1
        last = packer.rest()
        if last is not None:
            yield last

    async def put(self, messages: AsyncIterator[bytes], context: Context) -> bytes:
        """BEGIN, BLOCK..., END. Each block is kept as it is proven; a stream that breaks leaves the earlier ones.

        Raises InvalidRequestError or CorruptBlockError when the frames are in disorder.
        """
        if self.draining:
            raise UnavailableError("this kvstore is draining")
        stream = PutStream(self._store.default_ttl_s)
        while (message := await _next_of_put(messages)) is not None:
            frames = frame.decode(message, max_payload_bytes=MAX_SLAB_BYTES)
            for found in frames:
                info = stream.take(found)
                if info is not None:
                    stream.count(await self._store.put(info, StoredBlock(found.payload, found.checksum)))
            if stream.ended:
                return convert_kvstore.put_reply_to_bytes(stream.reply())
        raise InvalidRequestError("a Put stream ended without an END frame")

    @contextmanager
    def _only(self, work: str) -> Iterator[None]:
        """One at a time: each reads or writes all of the disk. Raises OverloadedError."""
        if self._long_work:
            raise OverloadedError(f"a {self._long_work} is running in this kvstore; try again when it is done")
        self._long_work = work
        try:
            yield
        finally:
            self._long_work = ""

    async def _until_drained(self, work: AsyncGenerator[Progress, None]) -> AsyncIterator[Progress]:
        async with aclosing(work):
            async for progress in work:
                yield progress
                if self.draining and progress.num_done < progress.num_total:
                    raise UnavailableError("this kvstore is draining; the work was left as far as it came")


async def _next_of_put(messages: AsyncIterator[bytes]) -> bytes | None:
    """None at the end. Bounded here too: not every sender sets a deadline."""
    try:
        async with asyncio.timeout(PUT_STALL_S):
            return await anext(messages, None)
    except TimeoutError:
        raise DeadlineError(f"Put: nothing came for {PUT_STALL_S:g} s; what came before is kept") from None


def _pages(held: Iterator[Any]) -> Iterator[Sequence[Any]]:
    page = []
    for one in held:
        page.append(one)
        if len(page) == LIST_PAGE:
            yield page
            page = []
    if page:
        yield page


def _keys(namespace: kvstore_pb2.StoreNamespace, hashes: Sequence[bytes]) -> list[bytes]:
    prefix = namespace_key(namespace.model_fingerprint, namespace.layout_fingerprint)
    return [prefix + block_hash for block_hash in convert_kvstore.hashes_from_pb("block_hashes", hashes)]
