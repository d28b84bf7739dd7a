"""The frames of one Put in order: BEGIN, which says whose the blocks are, BLOCK..., END, which proves them all."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.errors import CorruptBlockError, InvalidRequestError
from kvrelay.kv.frame import Frame, FrameKind
from kvrelay.kv.hashing import NO_HASH, ChecksumChain
from kvrelay.kv.store_messages import PutBegin, PutReply
from kvrelay.rpc.convert_decode import handoff_end_from_bytes
from kvrelay.rpc.convert_kvstore import put_begin_from_bytes
from kvstore.block import BlockInfo, namespace_key
from kvstore.store import PutOutcome


class PutStream:
    """`default_ttl_s` gives a tenant's time to live where the sender names none."""

    def __init__(self, default_ttl_s: Callable[[str], float]) -> None:
        self.keys: list[bytes] = []  # of the blocks that came
        self.ended = False
        self._default_ttl_s = default_ttl_s
        self._begin: PutBegin | None = None
        self._namespace = b""
        self._ttl_s = 0.0
        self._chain = ChecksumChain()
        self._outcomes = dict.fromkeys(PutOutcome, 0)

    def take(self, found: Frame) -> BlockInfo | None:
        """What is known of a BLOCK; None of another frame.

        Raises InvalidRequestError when it is not its turn, CorruptBlockError when END tells of other blocks.
        """
        if self._begin is None:
            self._take_begin(found)
            return None
        if self.ended:
            raise InvalidRequestError(f"Put: a {found.kind.name} frame follows END")
        if found.kind is FrameKind.END:
            self._take_end(found)
            return None
        return self._take_block(found, self._begin)

    def count(self, outcome: PutOutcome) -> None:
        self._outcomes[outcome] += 1

    def reply(self) -> PutReply:
        return PutReply(
            num_stored=self._outcomes[PutOutcome.STORED],
            num_present=self._outcomes[PutOutcome.PRESENT],
            num_refused=self._outcomes[PutOutcome.REFUSED],
        )

    def _take_begin(self, found: Frame) -> None:
        if found.kind is not FrameKind.BEGIN:
            raise InvalidRequestError(f"Put: the first frame is {found.kind.name}; it must be BEGIN")
        begin = put_begin_from_bytes(bytes(found.payload))
        self._namespace = namespace_key(begin.namespace.model_fingerprint, begin.namespace.layout_fingerprint)
        self._ttl_s = self._default_ttl_s(begin.tenant) if begin.ttl_s is None else begin.ttl_s
        self._begin = begin

    def _take_block(self, found: Frame, begin: PutBegin) -> BlockInfo:
        index = len(self.keys)
        if found.kind is not FrameKind.BLOCK or found.block_index != index:
            raise InvalidRequestError(
                f"Put: {found.kind.name} {found.block_index} came where block {index} or END was due"
            )
        self.keys.append(self._namespace + found.block_hash)
        self._chain.add(found.checksum)
        if not begin.parent_hashes:  # of a sender that knows no chains: every block stands alone
            return self._info(found, begin, NO_HASH, 0)
        if index >= len(begin.parent_hashes):
            raise InvalidRequestError(f"Put: BEGIN names {len(begin.parent_hashes)} parents; block {index} has none")
        return self._info(found, begin, begin.parent_hashes[index], begin.chain_indexes[index])

    def _info(self, found: Frame, begin: PutBegin, parent: bytes, chain_index: int) -> BlockInfo:
        return BlockInfo(
            key=self.keys[-1],
            parent=self._namespace + parent,
            chain_index=chain_index,
            tenant=begin.tenant,
            ttl_s=self._ttl_s,
        )

    def _take_end(self, found: Frame) -> None:
        end = handoff_end_from_bytes(bytes(found.payload))
        if end.num_blocks != len(self.keys) or end.checksum != self._chain.digest():
            raise CorruptBlockError(
                f"Put: END tells of {end.num_blocks} blocks, or of others than the {len(self.keys)} here"
            )
        self.ended = True
