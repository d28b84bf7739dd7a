"""One engine that answers several prompts at once: prompts in chunks, then all of them token by token in one batch."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvrelay.engine.batch import Batch, ScheduledRow
from kvrelay.engine.load import LoadedEngine
from kvrelay.engine.sequence import Sequence
from kvrelay.messages import NodeRequest
from kvrelay.sampling import GeneratedToken, SamplingParams
from kvrelay.types import BlockHash, BlockId, RequestId


def sequences_of(
    engine: LoadedEngine, prompts: Seq[tuple[int, ...]], max_tokens: int, sampling: SamplingParams
) -> list[Sequence]:
    """Sequences with the blocks they need, from block 0 on."""
    layout, next_block, made = engine.info.layout, 0, []
    for index, prompt in enumerate(prompts):
        request = NodeRequest(RequestId(str(index)), prompt, len(prompt), sampling)
        sequence = Sequence.create(request, BlockHash(bytes(32)), layout.block_tokens)
        num_blocks = layout.blocks_for(len(prompt) + max_tokens)
        sequence.block_table = [BlockId(i) for i in range(next_block, next_block + num_blocks)]
        next_block += num_blocks
        made.append(sequence)
    assert next_block <= engine.cache.num_blocks, "the pool is too small for these prompts"
    return made


def answer_together(
    engine: LoadedEngine,
    prompts: Seq[tuple[int, ...]],
    max_tokens: int,
    *,
    chunk_tokens: int = 64,
    sampling: SamplingParams | None = None,
) -> list[list[int]]:
    """`max_tokens` token ids for each prompt, greedy unless `sampling` says otherwise, also past an end."""
    sequences = sequences_of(engine, prompts, max_tokens, sampling or SamplingParams(0.0, seed=0))
    while unfinished := [sequence for sequence in sequences if sequence.num_output_tokens < max_tokens]:
        # Rows that decode and rows that still compute their prompt share a step, as on a decode node.
        rows = tuple(ScheduledRow(sequence, min(chunk_tokens, sequence.num_uncomputed)) for sequence in unfinished)
        for row, token in zip(rows, engine.runner.run(Batch(rows)), strict=True):
            row.sequence.num_computed_tokens += row.num_tokens
            if token is not None:
                assert isinstance(token, GeneratedToken)
                row.sequence.append(token.token_id)
    return [sequence.output_ids for sequence in sequences]
