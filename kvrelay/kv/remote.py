"""Client of one kvstore, for nodes: a store that is gone, slow or wrong is a miss, never an error.

Nothing here raises for what the store does. What arrives is proven before it is passed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence

from kvrelay.errors import CorruptBlockError, KVRelayError
from kvrelay.kv import frame
from kvrelay.kv.block_store import StoreHealth
from kvrelay.kv.chain import Chain, ChainBlock
from kvrelay.kv.frame import Frame, FrameKind
from kvrelay.kv.hashing import Buffer, ChecksumChain
from kvrelay.kv.layout import KVLayout
from kvrelay.pb import decode_pb2, kvstore_pb2, kvstore_pb2_grpc
from kvrelay.rpc import convert_kvstore, convert_types, raw
from kvrelay.rpc.calls import Replies, answer
from kvrelay.rpc.connection import Connection
from kvrelay.rpc.credentials import ChannelTLS
from kvrelay.types import BlockHash, Tier

MAX_HASHES = 65_536  # of one Match or Get
MIN_PUT_RATE = 16 << 20  # bytes/s; a Put that is slower than this is given up


class StoreClient(StoreHealth):
    """One store, one model: a `kvrelay.kv.block_store.BlockStore`. Made and used on one event loop.

    `timeout_s` bounds the wait for each answer and for each message of blocks.
    """

    def __init__(
        self,
        address: str,
        layout: KVLayout,
        model_fingerprint: str,
        *,
        timeout_s: float = 2.0,
        tls: ChannelTLS | None = None,
    ) -> None:
        super().__init__(f"kvstore {address}", timeout_s)
        self._slab_bytes = layout.slab_bytes
        self._namespace = kvstore_pb2.StoreNamespace(
            model_fingerprint=model_fingerprint, layout_fingerprint=layout.fingerprint
        )
        self._connection = Connection(address, tls=tls)

    async def match(self, hashes: Sequence[BlockHash], chain: Chain | None = None) -> list[Tier]:
        """Tiers of the longest prefix of `hashes` that the store holds; [] on failure."""
        tiers = await self._match(hashes, each=False)
        return tiers if len(tiers) <= len(hashes) else []

    async def missing(self, hashes: Sequence[BlockHash], chain: Chain | None = None) -> list[BlockHash]:
        """Those that the store does not hold; [] on failure, so that nothing is sent to a store that is not there."""
        tiers = await self._match(hashes, each=True)
        return [block_hash for block_hash, tier in zip(hashes, tiers, strict=False) if tier is Tier.NONE]

    async def get(
        self, hashes: Sequence[BlockHash], chain: Chain | None = None
    ) -> AsyncGenerator[tuple[BlockHash, Buffer, Tier], None]:
        """Proven slabs in order, each a view into its message; ends early at the first the store cannot give.

        Close the iterator (contextlib.aclosing) when leaving it early: that ends the call.
        """
        if not hashes or not self._allowed():
            return
        request = kvstore_pb2.GetRequest(namespace=self._namespace, block_hashes=hashes[:MAX_HASHES])
        call = raw.unary_stream(self._connection.channel, raw.KV_TRANSFER, "Get")(request.SerializeToString())
        try:
            async with Replies(call, bytes) as messages:
                num_found = 0
                while num_found < len(request.block_hashes):
                    async with asyncio.timeout(self._timeout_s):
                        message = await anext(messages, None)
                    self._succeeded()
                    if message is None:
                        return
                    for found in self._decode(message, num_found, hashes):
                        num_found += 1
                        frame.verify(found)
                        yield found.block_hash, found.payload, found.tier
        except CorruptBlockError as error:
            self.num_corrupt += 1
            self._failed(error)
        except (KVRelayError, TimeoutError) as error:
            self._failed(error)

    async def put(self, slabs: Sequence[tuple[BlockHash, bytes]], places: Sequence[ChainBlock] = ()) -> int:
        """Sends slabs; how many the store did not have, 0 on failure.

        `places` are those of the slabs in one chain, each after its parent if that is among them; without them the
        store takes the slabs for blocks of no chain, of the default tenant.
        """
        if not slabs or not self._allowed():
            return 0
        timeout_s = self._timeout_s + sum(len(slab) for _, slab in slabs) / MIN_PUT_RATE
        put = raw.stream_unary(self._connection.channel, raw.KV_TRANSFER, "Put")
        try:
            reply = await answer(put(frame.pack(self._put_frames(slabs, places)), timeout=timeout_s), _put_reply)
        except KVRelayError as error:
            self._failed(error)
            return 0
        self._succeeded()
        return reply.num_stored

    async def close(self) -> None:
        await self._connection.close()

    async def _match(self, hashes: Sequence[BlockHash], *, each: bool) -> list[Tier]:
        if not hashes or not self._allowed():
            return []
        request = kvstore_pb2.MatchRequest(namespace=self._namespace, block_hashes=hashes[:MAX_HASHES], each=each)
        stub = kvstore_pb2_grpc.KVStoreStub(self._connection.channel)
        try:
            tiers = await answer(stub.Match(request, timeout=self._timeout_s), _match_tiers)
        except KVRelayError as error:
            self._failed(error)
            return []
        self._succeeded()
        return tiers

    def _decode(self, message: bytes, index: int, hashes: Sequence[BlockHash]) -> list[Frame]:
        """The frames of the blocks that were asked for, from `index` on; not verified. Raises CorruptBlockError."""
        frames = frame.decode(message, max_payload_bytes=self._slab_bytes)
        for position, found in enumerate(frames, index):
            wanted = hashes[position] if position < len(hashes) else None
            if (found.kind, found.block_index, found.block_hash) != (FrameKind.BLOCK, position, wanted):
                raise CorruptBlockError(f"the store sent another frame than block {position}")
            if len(found.payload) != self._slab_bytes:
                raise CorruptBlockError(
                    f"block {position} has {len(found.payload)} bytes; a slab has {self._slab_bytes}"
                )
        return frames

    def _put_frames(
        self, slabs: Sequence[tuple[BlockHash, bytes]], places: Sequence[ChainBlock] = ()
    ) -> Iterator[Frame]:
        yield frame.control_frame(FrameKind.BEGIN, self._put_begin(places).SerializeToString())
        checksums = ChecksumChain()
        for index, (block_hash, slab) in enumerate(slabs):
            block = frame.block_frame(index, block_hash, slab)
            checksums.add(block.checksum)
            yield block
        end = decode_pb2.HandoffEnd(num_blocks=len(slabs), checksum=checksums.digest()).SerializeToString()
        yield frame.control_frame(FrameKind.END, end)

    def _put_begin(self, places: Sequence[ChainBlock]) -> kvstore_pb2.PutBegin:
        if not places:
            return kvstore_pb2.PutBegin(namespace=self._namespace)
        chain = places[0].chain
        return kvstore_pb2.PutBegin(
            namespace=self._namespace,
            tenant=chain.tenant,
            ttl_s=chain.ttl_s,
            parent_hashes=[place.parent for place in places],
            chain_indexes=[place.index for place in places],
        )


def _match_tiers(reply: kvstore_pb2.MatchReply) -> list[Tier]:
    return [convert_kvstore.tier_from_pb(tier) for tier in reply.tiers]


def _put_reply(message: bytes) -> kvstore_pb2.PutReply:
    return convert_types.parse(kvstore_pb2.PutReply, message)
