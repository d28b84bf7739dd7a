"""Blocks of the sequences that a decode node runs: they grow, are let go for others, come back, and are shared.

A sequence writes only to blocks that it alone holds; what it shares it reads. Bookkeeping alone, but for the copy of a
shared block that is about to be written.
"""

from __future__ import annotations

from collections.abc import Callable

from decode_node.scheduler import Restored
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import OverloadedError
from kvrelay.kv.pool import BlockPool
from kvrelay.types import BlockId, ReservationId

HEADROOM_BLOCKS = 1  # beyond what is computed, for a sequence to come back: it gets somewhere before it asks again


class SequenceMemory:
    """Belongs to the engine thread, as the pool does."""

    def __init__(self, pool: BlockPool, copy_block: Callable[[BlockId, BlockId], None], max_model_len: int) -> None:
        self._pool = pool
        self._copy_block = copy_block
        self._max_model_len = max_model_len
        self._to_load: set[Sequence] = set()

    def load_on_return(self, sequence: Sequence) -> None:
        """What is missing of a sequence that was dropped is loaded when it is restored, and not computed."""
        self._to_load.add(sequence)

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes the next `num_tokens` positions of a sequence that holds blocks its own to write.

        Takes blocks as needed, evicting cached ones; False, changing nothing, if there are too few.
        """
        table, block_tokens = sequence.block_table, sequence.block_tokens
        first = sequence.num_computed_tokens // block_tokens
        end = -(-(sequence.num_computed_tokens + num_tokens) // block_tokens)
        shared = [index for index in range(first, min(end, len(table))) if not self._pool.may_write(table[index])]
        num_missing = max(0, end - len(table))
        if not shared and not num_missing:
            return True
        try:
            fresh = self._pool.allocate(len(shared) + num_missing)
        except OverloadedError:
            return False
        for index in shared:
            self._write_apart(sequence, index, fresh.pop())
        table.extend(fresh)
        return True

    def restore(self, sequence: Sequence) -> Restored:
        """Gives blocks to a sequence that has none: for all its tokens, and headroom. What the cache still has of it
        counts as computed. NO_ROOM, changing nothing, if there are too few."""
        name = ReservationId(f"restore {id(sequence)}")
        prefix = sequence.block_hashes[: sequence.num_reusable_blocks]
        try:
            reserved = self._pool.reserve(name, prefix, self._blocks_to_return(sequence))
        except OverloadedError:
            return Restored.NO_ROOM
        sequence.block_table = self._pool.commit(name)
        sequence.num_computed_tokens = reserved.num_cached * sequence.block_tokens
        sequence.num_registered_blocks = reserved.num_cached
        loads = sequence in self._to_load and reserved.num_cached < sequence.num_reusable_blocks
        self._to_load.discard(sequence)
        return Restored.TO_LOAD if loads else Restored.READY

    def share(self, parent: Sequence, fork: Sequence, num_blocks: int) -> None:
        """Starts `fork`, whose tokens are the parent's first ones, on the parent's blocks, all but its last token.

        It holds `num_blocks` then, and one more is to be had for the copy of a shared block that it will write to.
        Raises OverloadedError, changing nothing.
        """
        num_shared = -(-(fork.num_tokens - 1) // fork.block_tokens)
        num_copied = int((fork.num_tokens - 1) % fork.block_tokens > 0)
        fresh = self._pool.allocate(max(0, num_blocks - num_shared) + num_copied)
        self._pool.release(fresh[:num_copied])
        fork.block_table = parent.block_table[:num_shared] + fresh[num_copied:]
        self._pool.acquire(fork.block_table[:num_shared])
        fork.num_computed_tokens = fork.num_tokens - 1
        fork.num_registered_blocks = min(parent.num_registered_blocks, fork.num_computed_tokens // fork.block_tokens)

    def drop(self, sequence: Sequence) -> None:
        """Lets go of all blocks; full ones stay in the cache while there is room for them."""
        self._to_load.discard(sequence)
        self._pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = sequence.num_registered_blocks = 0

    def _write_apart(self, sequence: Sequence, index: int, own: BlockId) -> None:
        shared = sequence.block_table[index]
        self._copy_block(shared, own)
        sequence.block_table[index] = own
        self._pool.release([shared])

    def _blocks_to_return(self, sequence: Sequence) -> int:
        """Never more than the sequence may come to need, which was found to fit the pool when it was admitted."""
        sampling = sequence.request.sampling
        most = self._max_model_len
        if sampling.max_tokens is not None:
            most = min(most, sequence.num_prompt_tokens + sampling.max_tokens)
        blocks = -(-sequence.num_tokens // sequence.block_tokens)
        return max(blocks, min(blocks + HEADROOM_BLOCKS, -(-most // sequence.block_tokens)))
