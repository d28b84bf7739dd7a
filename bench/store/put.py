"""Put, with all that a BEGIN may say of the blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import grpc

from kvrelay.kv import frame
from kvrelay.kv.frame import Frame, FrameKind
from kvrelay.kv.hashing import ChecksumChain, hash_fields
from kvrelay.kv.layout import KVLayout
from kvrelay.pb import decode_pb2, kvstore_pb2
from kvrelay.rpc import raw
from kvrelay.rpc.calls import answer
from kvrelay.types import BlockHash

ROOT = hash_fields(b"bench.store")  # of all chains


class Putter:
    """Puts chains of one model's blocks over a channel."""

    def __init__(self, channel: grpc.aio.Channel, layout: KVLayout, model_fingerprint: str) -> None:
        self._namespace = kvstore_pb2.StoreNamespace(
            model_fingerprint=model_fingerprint, layout_fingerprint=layout.fingerprint
        )
        self._put = raw.stream_unary(channel, raw.KV_TRANSFER, "Put")

    async def put(self, hashes: Sequence[BlockHash], slabs: Sequence[bytes], start: int = 0) -> kvstore_pb2.PutReply:
        """`hashes` are the whole chain; the slabs are of those from `start` on. Raises KVRelayError."""
        call = self._put(frame.pack(self.frames(hashes, slabs, start)))
        return await answer(call, kvstore_pb2.PutReply.FromString)

    def frames(self, hashes: Sequence[BlockHash], slabs: Sequence[bytes], start: int) -> Iterator[Frame]:
        parents = [ROOT, *hashes][start : start + len(slabs)]
        indexes = range(start, start + len(slabs))
        begin = kvstore_pb2.PutBegin(namespace=self._namespace, parent_hashes=parents, chain_indexes=indexes)
        yield frame.control_frame(FrameKind.BEGIN, begin.SerializeToString())
        chain = ChecksumChain()
        for index, (block_hash, slab) in enumerate(zip(hashes[start:], slabs, strict=True)):
            block = frame.block_frame(index, block_hash, slab)
            chain.add(block.checksum)
            yield block
        end = decode_pb2.HandoffEnd(num_blocks=len(slabs), checksum=chain.digest())
        yield frame.control_frame(FrameKind.END, end.SerializeToString())
