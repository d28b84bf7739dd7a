"""What one KV stream must look like, frame by frame, for its blocks to be believed. Plain data, no I/O.

The node trusts no name the sender gives: it hashed the prompt itself when it granted the reservation, under its own
fingerprints, and every frame must carry the hash that its place in the chain has here.
"""

from __future__ import annotations

from kvrelay.cluster import ModelInfo
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import CorruptBlockError, ForeignBlockError, InvalidRequestError, StaleError
from kvrelay.kv.frame import Frame, FrameKind, verify
from kvrelay.kv.hashing import ChecksumChain
from kvrelay.messages import HandoffBegin, HandoffEnd
from kvrelay.types import InstanceId


def check_identity(begin: HandoffBegin, instance_id: InstanceId, info: ModelInfo) -> None:
    """Raises StaleError for a stream meant for another process, ForeignBlockError for another model or layout."""
    if begin.instance_id != instance_id:
        raise StaleError(f"the handoff is for instance {begin.instance_id}; this is {instance_id}")
    if begin.model_fingerprint != info.fingerprint:
        raise ForeignBlockError(
            f"the handoff's model fingerprint is {begin.model_fingerprint}; this node serves {info.fingerprint}"
        )
    if begin.layout_fingerprint != info.layout.fingerprint:
        raise ForeignBlockError(
            f"the handoff's KV layout is {begin.layout_fingerprint}; this node has {info.layout.fingerprint}"
        )


class HandoffChecker:
    """Judges the frames between BEGIN and END of one stream, in order."""

    def __init__(self, begin: HandoffBegin, sequence: Sequence, num_cached: int, slab_bytes: int) -> None:
        """Raises InvalidRequestError unless `begin` announces exactly the blocks that are not here yet."""
        self._sequence = sequence
        self._slab_bytes = slab_bytes
        self._num_full, self._num_tail_tokens = divmod(sequence.num_tokens, sequence.block_tokens)
        self._num_blocks = self._num_full + (self._num_tail_tokens > 0) - num_cached
        self._first_block = num_cached
        self._checksums = ChecksumChain()
        self._offset_bytes = 0  # of the block that is due, how much is here
        self.num_received = 0  # whole blocks
        if (begin.first_block, begin.num_blocks) != (num_cached, self._num_blocks):
            raise InvalidRequestError(
                f"the handoff announces {begin.num_blocks} blocks from block {begin.first_block}; "
                f"missing here are {self._num_blocks} from block {num_cached}"
            )

    def accept(self, frame: Frame) -> int:
        """Proves the next block, or the next part of it; returns the block's index in the block table.

        A block's parts come in order and without a gap, each proven for itself. Raises CorruptBlockError.
        """
        index = self._first_block + self.num_received
        if self.num_received == self._num_blocks:
            raise CorruptBlockError(f"a {frame.kind.name} frame follows the last of {self._num_blocks} blocks")
        expected = FrameKind.BLOCK if index < self._num_full else FrameKind.TAIL
        if frame.kind is not expected or frame.block_index != index:
            raise CorruptBlockError(
                f"a {frame.kind.name} frame of block {frame.block_index} came; {expected.name} of block {index} is due"
            )
        end = self._check_part(frame)
        if expected is FrameKind.BLOCK and frame.block_hash != self._sequence.block_hashes[index]:
            raise CorruptBlockError(
                f"block {index} has hash {frame.block_hash.hex()}; "
                f"the prompt's chain has {self._sequence.block_hashes[index].hex()} there"
            )
        if expected is FrameKind.TAIL and frame.num_tokens != self._num_tail_tokens:
            raise CorruptBlockError(f"the tail has {frame.num_tokens} tokens; {self._num_tail_tokens} are due")
        verify(frame)
        self._checksums.add(frame.checksum)
        complete = end == self._slab_bytes
        self._offset_bytes = 0 if complete else end
        self.num_received += complete
        return index

    def _check_part(self, frame: Frame) -> int:
        """The byte of the slab at which the frame ends."""
        end = frame.offset_bytes + len(frame.payload)
        if frame.offset_bytes != self._offset_bytes or not frame.offset_bytes < end <= self._slab_bytes:
            raise CorruptBlockError(
                f"block {frame.block_index}: bytes {frame.offset_bytes} to {end} came; due are those from byte "
                f"{self._offset_bytes} on, of the slab's {self._slab_bytes}"
            )
        return end

    def finish(self, end: HandoffEnd) -> None:
        """Proves that everything came. Raises CorruptBlockError."""
        if self._offset_bytes:
            raise CorruptBlockError(
                f"END came after {self._offset_bytes} of {self._slab_bytes} bytes of block "
                f"{self._first_block + self.num_received}"
            )
        if not end.num_blocks == self.num_received == self._num_blocks:
            raise CorruptBlockError(
                f"END counts {end.num_blocks} blocks after {self.num_received} came; {self._num_blocks} are due"
            )
        if end.checksum != self._checksums.digest():
            raise CorruptBlockError("END's checksum is not that of the blocks that came")
