"""One prompt's blocks as the frames that leave, in order: whole slabs, or the parts that long ones are cut into."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from kvrelay.engine.sequence import Sequence
from kvrelay.kv.frame import Frame, block_frame, part_bytes, parts_per_slab, tail_frame
from kvrelay.kv.hashing import Buffer, ChecksumChain
from kvrelay.kv.layout import KVLayout
from kvrelay.types import BlockId


class Parts:
    """Of one handoff. Counts are of parts, unless they say blocks; a slab that a message has room for is one part."""

    def __init__(
        self,
        layout: KVLayout,
        sequence: Sequence,
        first_block: int,
        view_slabs: Callable[[Seq[BlockId], int, int], Seq[Buffer]],
    ) -> None:
        """The blocks before `first_block` stay. `view_slabs` is `PagedKVCache`'s."""
        self._layout = layout
        self._hashes = sequence.block_hashes
        self._num_tokens = sequence.num_tokens
        self._first_block = first_block
        self._view_slabs = view_slabs
        self._per_slab = parts_per_slab(layout.slab_bytes)
        self._part_bytes = part_bytes(layout.slab_bytes)
        self._chain = ChecksumChain()
        self._num_taken = 0
        self.num_bytes = 0  # taken

    @property
    def num_blocks(self) -> int:
        """To send in all."""
        return self._layout.blocks_for(self._num_tokens) - self._first_block

    @property
    def num_blocks_taken(self) -> int:
        """Of which the last part was taken."""
        return self._num_taken // self._per_slab

    @property
    def all_taken(self) -> bool:
        return self.num_blocks_taken == self.num_blocks

    def digest(self) -> bytes:
        """Of the checksums of what was taken."""
        return self._chain.digest()

    def num_waiting(self, num_computed_tokens: int) -> int:
        """Not taken, of the blocks whose KV is final."""
        layout = self._layout
        final = num_computed_tokens // layout.block_tokens
        if num_computed_tokens >= self._num_tokens:
            final = layout.blocks_for(self._num_tokens)
        return max(0, (final - self._first_block) * self._per_slab - self._num_taken)

    def take(self, block_ids: Seq[BlockId], num_parts: int) -> list[Frame]:
        """The next ones, for one message: of several blocks the whole slabs, or one part, since no message has room for
        two parts of a slab. On the CPU they are views: see `view_slabs`. `block_ids` are of the whole prompt.
        """
        num_blocks_taken, part = divmod(self._num_taken, self._per_slab)
        first, start = self._first_block + num_blocks_taken, part * self._part_bytes
        end = min(start + self._part_bytes, self._layout.slab_bytes)
        payloads = self._view_slabs(block_ids[first : first + num_parts], start, end)
        frames = [self._frame(index, payload, start) for index, payload in enumerate(payloads, first)]
        for frame in frames:
            self._chain.add(frame.checksum)
        self._num_taken += len(frames)
        self.num_bytes += len(frames) * (end - start)
        return frames

    def _frame(self, index: int, payload: Buffer, offset_bytes: int) -> Frame:
        if index < len(self._hashes):
            return block_frame(index, self._hashes[index], payload, offset_bytes=offset_bytes)
        num_tail_tokens = self._num_tokens - index * self._layout.block_tokens
        cleared = self._layout.without_rest(payload, num_tail_tokens, offset_bytes)
        return tail_frame(index, num_tail_tokens, cleared, offset_bytes=offset_bytes)
