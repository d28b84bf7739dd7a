"""The store's calls: Match and Stats as protobuf, Get and Put as raw frames (docs/wire.md)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import grpc

from kvrelay.errors import CorruptBlockError, InvalidRequestError, UnavailableError
from kvrelay.kv import frame
from kvrelay.kv.frame import Frame, FrameKind
from kvrelay.kv.hashing import HASH_BYTES, ChecksumChain
from kvrelay.pb import decode_pb2, kvstore_pb2, kvstore_pb2_grpc
from kvrelay.rpc import convert_kvstore, convert_types, raw
from kvrelay.rpc.channel import MAX_MESSAGE_BYTES
from kvrelay.types import BlockHash
from kvstore.block import StoredBlock, namespace_key
from kvstore.store import PutOutcome, Store

MAX_HASHES = 65_536
MAX_SLAB_BYTES = MAX_MESSAGE_BYTES - frame.HEADER_BYTES

Context = grpc.aio.ServicerContext[Any, Any]


class KVStoreService(kvstore_pb2_grpc.KVStoreServicer):
    """`draining`: Put is refused; what is held is served to the end."""

    def __init__(self, store: Store) -> None:
        self.draining = False
        self._store = store

    def register(self, server: grpc.aio.Server) -> None:
        kvstore_pb2_grpc.add_KVStoreServicer_to_server(self, server)
        transfer = raw.raw_methods(raw.KV_TRANSFER, unary_stream={"Get": self.get}, stream_unary={"Put": self.put})
        server.add_generic_rpc_handlers((transfer,))

    async def Match(self, request: kvstore_pb2.MatchRequest, context: Context) -> kvstore_pb2.MatchReply:
        keys = _keys(request.namespace, request.block_hashes)
        tiers = self._store.match(keys) if request.each else self._store.match_prefix(keys)
        return kvstore_pb2.MatchReply(tiers=[convert_kvstore.tier_to_pb(tier) for tier in tiers])

    async def Stats(self, request: kvstore_pb2.StatsRequest, context: Context) -> kvstore_pb2.StatsReply:
        stats = self._store.stats()
        return kvstore_pb2.StatsReply(
            memory=kvstore_pb2.TierStats(**asdict(stats.memory)),
            disk=kvstore_pb2.TierStats(**asdict(stats.disk)),
            misses=stats.misses,
            corrupt=stats.corrupt,
            write_failures=stats.write_failures,
        )

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
        namespace: bytes | None = None
        received = _Received()
        async for message in messages:
            frames = frame.decode(message, max_payload_bytes=MAX_SLAB_BYTES)
            for found in frames:
                if namespace is None:
                    namespace = _begin(found)
                elif received.ended:
                    raise InvalidRequestError(f"Put: a {found.kind.name} frame follows END")
                elif found.kind is FrameKind.END:
                    received.end(found)
                else:
                    key = namespace + received.take(found)
                    # A view into a message of several would keep them all in memory for as long as one of them.
                    payload = found.payload if len(frames) == 1 else bytes(found.payload)
                    received.count(key, await self._store.put(key, StoredBlock(payload, found.checksum)))
            if received.ended:
                self._store.touch(received.keys)
                return received.reply().SerializeToString()
        raise InvalidRequestError("a Put stream ended without an END frame")


class _Received:
    """What came in one Put stream."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.ended = False
        self._chain = ChecksumChain()
        self._outcomes = dict.fromkeys(PutOutcome, 0)

    def take(self, found: Frame) -> BlockHash:
        index = len(self.keys)
        if found.kind is not FrameKind.BLOCK or found.block_index != index:
            raise InvalidRequestError(
                f"Put: {found.kind.name} {found.block_index} came where block {index} or END was due"
            )
        self._chain.add(found.checksum)
        return found.block_hash

    def count(self, key: bytes, outcome: PutOutcome) -> None:
        self.keys.append(key)
        self._outcomes[outcome] += 1

    def end(self, found: Frame) -> None:
        end = convert_types.parse(decode_pb2.HandoffEnd, bytes(found.payload))
        if end.num_blocks != len(self.keys) or end.checksum != self._chain.digest():
            raise CorruptBlockError(
                f"Put: END tells of {end.num_blocks} blocks, or of others than the {len(self.keys)} here"
            )
        self.ended = True

    def reply(self) -> kvstore_pb2.PutReply:
        return kvstore_pb2.PutReply(
            num_stored=self._outcomes[PutOutcome.STORED],
            num_present=self._outcomes[PutOutcome.PRESENT],
            num_refused=self._outcomes[PutOutcome.REFUSED],
        )


def _begin(found: Frame) -> bytes:
    """The namespace that a Put's first frame names."""
    if found.kind is not FrameKind.BEGIN:
        raise InvalidRequestError(f"Put: the first frame is {found.kind.name}; it must be BEGIN")
    namespace = convert_types.parse(kvstore_pb2.PutBegin, bytes(found.payload)).namespace
    return namespace_key(namespace.model_fingerprint, namespace.layout_fingerprint)


def _keys(namespace: kvstore_pb2.StoreNamespace, hashes: Sequence[bytes]) -> list[bytes]:
    if len(hashes) > MAX_HASHES:
        raise InvalidRequestError(f"block_hashes has {len(hashes)} entries; at most {MAX_HASHES} are allowed")
    for block_hash in hashes:
        if len(block_hash) != HASH_BYTES:
            raise InvalidRequestError(f"block_hashes holds one of {len(block_hash)} bytes; each has {HASH_BYTES}")
    prefix = namespace_key(namespace.model_fingerprint, namespace.layout_fingerprint)
    return [prefix + block_hash for block_hash in hashes]
