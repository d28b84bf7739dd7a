"""An engine whose answers give every mix-up of KV away: a slot's "KV" is the token that was computed into it, and the
next token is a hash of what the slots of a sequence's context hold, not of what the sequence says of itself."""

from __future__ import annotations

import asyncio
import hashlib
import struct
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq

from kvrelay.engine.batch import Batch, build
from kvrelay.errors import BadLogitsError
from kvrelay.kv.hashing import Buffer
from kvrelay.messages import NodeRequest
from kvrelay.sampling import GeneratedToken
from kvrelay.types import BlockId

NOTHING = 0xFFFFFFFF  # in a slot that was never written


def draw(context: Seq[int], seed: int) -> int:
    """In [10, 90): never an end of sequence of `fake_engine.make_info`."""
    digest = hashlib.blake2b(struct.pack(f"<Q{len(context)}I", seed, *context), digest_size=8).digest()
    return 10 + int.from_bytes(digest, "little") % 80


def reference_answer(request: NodeRequest) -> list[int]:
    """The output tokens of max_tokens steps, each from all tokens before it."""
    tokens = list(request.token_ids)
    assert request.sampling.max_tokens is not None
    assert request.sampling.seed is not None
    for _ in range(request.sampling.max_tokens):
        tokens.append(draw(tokens, request.sampling.seed))
    return tokens[request.num_prompt_tokens :]


class SlotCache:
    """One token id a slot."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.slots = [NOTHING] * (num_blocks * block_tokens)
        self.num_copied = 0

    def read_slab(self, block_id: BlockId) -> bytes:
        return struct.pack(f"<{self.block_tokens}I", *self.slots[self._span(block_id)])

    def write_slab(self, block_id: BlockId, payload: Buffer) -> None:
        self.slots[self._span(block_id)] = struct.unpack(f"<{self.block_tokens}I", payload)

    def write_part(self, block_id: BlockId, payload: Buffer, offset_bytes: int) -> None:
        slab, end = self.read_slab(block_id), offset_bytes + len(payload)
        self.write_slab(block_id, slab[:offset_bytes] + bytes(payload) + slab[end:])

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        self.num_copied += 1
        self.slots[self._span(target)] = self.slots[self._span(source)]

    def _span(self, block_id: BlockId) -> slice:
        return slice(block_id * self.block_tokens, (block_id + 1) * self.block_tokens)


class SlotRunner:
    """Writes a step's tokens into their slots, then draws from what each row's slots hold.

    `before_step` runs first in each step and may block.
    """

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache
        self.before_step: Callable[[], None] = lambda: None
        self.num_computed = 0
        self.batches: list[list[int]] = []  # tokens of each row, by step

    def run(self, batch: Batch) -> list[GeneratedToken | BadLogitsError | None]:
        self.before_step()
        arrays = build(batch, self._cache.block_tokens)
        for slot, token_id in zip(arrays.slot_mapping_T, arrays.token_ids_T, strict=True):
            self._cache.slots[slot] = token_id
        self.num_computed += batch.num_tokens
        self.batches.append([row.num_tokens for row in batch.rows])
        drawn: list[GeneratedToken | BadLogitsError | None] = []
        for row, table, length in zip(batch.rows, arrays.block_tables, arrays.context_lens, strict=True):
            seed = row.sequence.request.sampling.seed
            assert seed is not None
            drawn.append(GeneratedToken(draw(self._context(table, length), seed)) if row.yields_token else None)
        return drawn

    def _context(self, table: Seq[BlockId], length: int) -> list[int]:
        size = self._cache.block_tokens
        return [self._cache.slots[table[position // size] * size + position % size] for position in range(length)]


class Gate:
    """Holds the engine thread at the beginning of a step, the first or a later one, until opened."""

    def __init__(self, runner: SlotRunner, after: int = 0) -> None:
        self._left = after
        self._entered, self._open = threading.Event(), threading.Event()
        runner.before_step = self._pass

    def _pass(self) -> None:
        if self._left > 0:
            self._left -= 1
            return
        self._entered.set()
        self._open.wait()

    async def reached(self) -> None:
        await asyncio.to_thread(self._entered.wait)

    def open(self) -> None:
        self._open.set()
