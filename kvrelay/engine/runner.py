"""Runs a batch through the model and draws the tokens. Belongs to the engine thread."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvrelay.engine.batch import Batch, Drawn, ScheduledRow, StepArrays, build
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import StructureError
from kvrelay.kv.cache import PagedKVCache
from kvrelay.messages import NodeRequest
from kvrelay.model.sampler import PendingTokens, Sampler, SamplingRow
from kvrelay.model.step import StepInput
from kvrelay.model.transfer import on_device
from kvrelay.model.weights import StepDecoder
from kvrelay.sampling import SamplingParams
from kvrelay.types import BlockHash, BlockId, RequestId


class InFlight:
    """A step that the device may still be working on."""

    def __init__(self, batch: Batch, tokens: PendingTokens, failed: Mapping[int, StructureError]) -> None:
        """`failed` are those of the rows that draw for which no token may follow, by their places among them."""
        self._batch = batch
        self._tokens = tokens
        self._failed = failed

    def result(self) -> list[Drawn]:
        """Each row's drawn token, or None for a row that does not reach its last token.

        Waits for the step: when this returns the rows' KV is final, and their blocks may be read or given back. A row
        whose logits are NaN or infinite, or that nothing may follow, has its error there; the others are as right as
        ever.
        """
        drawn = iter([self._failed.get(place, token) for place, token in enumerate(self._tokens.result())])
        return [next(drawn) if row.yields_token else None for row in self._batch.rows]


class ModelRunner:
    """One step: lay out, run, sample. Changes the cache and no sequence."""

    def __init__(
        self,
        decoder: StepDecoder,
        cache: PagedKVCache,
        sampler: Sampler,
        eos_token_ids: tuple[int, ...],
        *,
        block_tokens: int,
        device: str = "cpu",
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._sampler = sampler
        self._eos_token_ids = eos_token_ids
        self._block_tokens = block_tokens
        self._device = torch.device(device)

    def run(self, batch: Batch) -> list[Drawn]:
        """`launch` and its result."""
        return self.launch(batch).result()

    def launch(self, batch: Batch) -> InFlight:
        """Queues a step that writes the rows' KV and draws their tokens.

        On CUDA this does not wait for the device, so that the host may prepare what comes next before it asks for the
        result; on a CPU the step is done when this returns. Until the result is taken, the rows' sequences and blocks
        must stay as they are.
        """
        with torch.inference_mode():
            self._cache.order_after_writes()
            step = self._step_input(build(batch, self._block_tokens))
            logits_NV = self._decoder.step(step, self._cache)
            drawing = [row.sequence for row in batch.rows if row.yields_token]
            masks = [_mask(sequence) for sequence in drawing]  # while a GPU is still at the step
            rows = [self._sampling_row(*pair) for pair in zip(drawing, masks, strict=True)]
            failed = {place: mask for place, mask in enumerate(masks) if isinstance(mask, StructureError)}
            return InFlight(batch, self._sampler.launch(logits_NV, rows), failed)

    def warm_up(self) -> None:
        """Runs a prompt and one decode step over block 0, which must not be in use yet; its contents are left over."""
        prompt = NodeRequest(
            RequestId("warm-up"), (0,) * min(8, self._block_tokens - 1), 1, SamplingParams(0.0, seed=0)
        )
        sequence = Sequence.create(prompt, BlockHash(bytes(32)), self._block_tokens)
        sequence.block_table = [BlockId(0)]
        self.run(Batch((ScheduledRow(sequence, sequence.num_tokens),)))
        sequence.num_computed_tokens = sequence.num_tokens - 1
        self.run(Batch((ScheduledRow(sequence, 1),)))

    def _step_input(self, arrays: StepArrays) -> StepInput:
        def ids(values: list[int] | list[BlockId]) -> torch.Tensor:
            return on_device(values, torch.int64, self._device)

        return StepInput(
            token_ids_T=ids(arrays.token_ids_T),
            positions_T=ids(arrays.positions_T),
            slot_mapping_T=ids(arrays.slot_mapping_T),
            query_starts=tuple(arrays.query_starts),
            context_lens=tuple(arrays.context_lens),
            block_table_RB=self._block_table(arrays.block_tables),
            logit_rows_N=ids(arrays.logit_rows_N),
        )

    def _block_table(self, tables: list[list[BlockId]]) -> torch.Tensor:
        longest = max(map(len, tables))
        padded = [table + [BlockId(0)] * (longest - len(table)) for table in tables]
        return on_device(padded, torch.int32, self._device)

    def _sampling_row(self, sequence: Sequence, mask: bytes | StructureError | None) -> SamplingRow:
        return SamplingRow(
            params=sequence.request.sampling,
            position=sequence.num_tokens,
            token_ids=sequence.token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            eos_token_ids=self._eos_token_ids,
            mask=None if isinstance(mask, StructureError) else mask,
        )


def _mask(sequence: Sequence) -> bytes | StructureError | None:
    """Which tokens may follow, None for all; the error of one that cannot go on is its own."""
    if sequence.matcher is None:
        return None
    try:
        return sequence.matcher.mask()
    except StructureError as error:
        return error
