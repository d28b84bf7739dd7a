"""Decode steps as CUDA graphs: what a step launches is recorded once per batch size and replayed by one call.

A graph reads and writes the same memory at every replay. So a step's inputs are copied into tensors that stay, a batch
is filled up to the next recorded size with rows that write to the cache's scratch block, and the logits come out in a
tensor that the next replay overwrites; what is queued on the stream before that, such as sampling, reads it safely.
All graphs are recorded when the node starts: no request waits for one.

Shape letters: R rows, B blocks of a table, N rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvrelay.kv.cache import PagedKVCache
from kvrelay.model.attention import CapturableBackend
from kvrelay.model.decoder import Decoder, clear_begun_blocks
from kvrelay.model.step import StepInput
from kvrelay.model.transfer import on_device
from kvrelay.model.weights import StepDecoder

logger = logging.getLogger(__name__)

FINE_BUCKETS = (1, 2, 4, 8)
BUCKET_STEP = 16  # beyond those: matrix products pad their rows to as many anyway

Record = Callable[[Callable[[], None]], Callable[[], None]]


def with_graphs(decoder: StepDecoder, cache: PagedKVCache, max_rows: int) -> StepDecoder:
    """The decoder with its decode steps of up to `max_rows` rows recorded, where device and attention allow that."""
    if not cache.tensor.is_cuda or max_rows < 1 or not isinstance(decoder, Decoder):
        return decoder
    if not isinstance(decoder.attention, CapturableBackend):
        logger.warning("decode steps are not recorded: attention %s cannot be", decoder.attention.name)
        return decoder
    started = time.monotonic()
    graphed = GraphedDecoder(decoder, decoder.attention, cache, max_rows, CudaRecorder())
    logger.info("recorded decode steps of up to %d rows in %.1f s", max_rows, time.monotonic() - started)
    return graphed


def batch_buckets(max_rows: int) -> list[int]:
    """The batch sizes to record, ascending; the last is `max_rows`."""
    sizes = [*FINE_BUCKETS, *range(BUCKET_STEP, max_rows, BUCKET_STEP)]
    return [*(size for size in sizes if size < max_rows), max_rows]


class CudaRecorder:
    """Records what a function queues; the recordings share one pool of memory, for they never run side by side."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, queue_step: Callable[[], None]) -> Callable[[], None]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # once for real: kernels are compiled and loaded, libraries make their workspaces
            queue_step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads (copies of slabs) may call CUDA meanwhile: only this thread's calls are held to the rules.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            queue_step()
        self._pool = graph.pool()
        return graph.replay


class GraphedDecoder:
    """Steps as `Decoder` does, those of one token a row from a recording. One engine thread's."""

    def __init__(
        self,
        decoder: Decoder,
        attention: CapturableBackend,
        cache: PagedKVCache,
        max_rows: int,
        record: Record,
    ) -> None:
        """Records every size, the largest first, so that the smaller ones find their memory made."""
        self.config = decoder.config
        self.dtype = decoder.dtype
        self.backend_name = decoder.backend_name
        self._decoder = decoder
        self._reads_whole_blocks = attention.reads_whole_blocks
        self._cache = cache
        self._inputs = _Inputs(cache, max_rows, decoder.config.max_model_len)
        self._logits_NV = torch.zeros(max_rows, decoder.config.vocab_size, device=cache.tensor.device)
        self._buckets = batch_buckets(max_rows)
        self._replays = {
            num_rows: record(self._queue_step(attention, num_rows)) for num_rows in reversed(self._buckets)
        }

    @torch.inference_mode()
    def step(self, inp: StepInput, cache: PagedKVCache) -> Tensor:
        """As Decoder.step, with the cache of the recordings; the logits live until the next step."""
        num_rows = inp.num_rows
        if num_rows > self._buckets[-1] or len(inp.token_ids_T) > num_rows:
            return self._decoder.step(inp, cache)
        if self._reads_whole_blocks:
            clear_begun_blocks(inp, cache)
        bucket = self._buckets[bisect_left(self._buckets, num_rows)]
        self._inputs.fill(inp, bucket)
        self._replays[bucket]()
        if len(inp.logit_rows_N) == num_rows:
            return self._logits_NV[:num_rows]
        return self._logits_NV.index_select(0, inp.logit_rows_N)

    def _queue_step(self, attention: CapturableBackend, num_rows: int) -> Callable[[], None]:
        inputs, logits_NV = self._inputs.of_rows(num_rows), self._logits_NV[:num_rows]

        @torch.inference_mode()
        def queue_step() -> None:
            plan = attention.plan_decode(self._inputs.context_lens_R[:num_rows], inputs.block_table_RB, self._cache)
            logits_NV.copy_(self._decoder.forward(inputs, plan, self._cache))

        return queue_step


class _Inputs:
    """What the recordings read, of the largest batch; smaller ones read the first rows."""

    def __init__(self, cache: PagedKVCache, max_rows: int, max_model_len: int) -> None:
        device = cache.tensor.device
        self._scratch_block = int(cache.scratch_block)
        self._scratch_slot = self._scratch_block * cache.layout.block_tokens
        self.token_ids_R = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.positions_R = torch.zeros_like(self.token_ids_R)
        self.slot_mapping_R = torch.full_like(self.token_ids_R, self._scratch_slot)
        self.rows_R = torch.arange(max_rows, device=device)
        self.context_lens_R = torch.ones(max_rows, dtype=torch.int32, device=device)
        num_blocks = cache.layout.blocks_for(max_model_len)
        self.block_table_RB = torch.full((max_rows, num_blocks), self._scratch_block, dtype=torch.int32, device=device)

    def of_rows(self, num_rows: int) -> StepInput:
        """The tensors of a step of so many rows; `context_lens` is not the rows', which change."""
        return StepInput(
            token_ids_T=self.token_ids_R[:num_rows],
            positions_T=self.positions_R[:num_rows],
            slot_mapping_T=self.slot_mapping_R[:num_rows],
            query_starts=tuple(range(num_rows + 1)),
            context_lens=(1,) * num_rows,
            block_table_RB=self.block_table_RB[:num_rows],
            logit_rows_N=self.rows_R[:num_rows],
        )

    def fill(self, inp: StepInput, bucket: int) -> None:
        """Copies a step in. The rows from there to `bucket` read one position of the scratch block and write it."""
        num_rows, num_blocks = inp.block_table_RB.shape
        self.token_ids_R[:num_rows].copy_(inp.token_ids_T)
        self.positions_R[:num_rows].copy_(inp.positions_T)
        self.slot_mapping_R[:num_rows].copy_(inp.slot_mapping_T)
        self.context_lens_R[:num_rows].copy_(on_device(inp.context_lens, torch.int32, self.context_lens_R.device))
        self.block_table_RB[:num_rows, :num_blocks].copy_(inp.block_table_RB)
        if num_rows < bucket:
            filling = slice(num_rows, bucket)
            self.token_ids_R[filling].zero_()
            self.positions_R[filling].zero_()
            self.slot_mapping_R[filling].fill_(self._scratch_slot)
            self.context_lens_R[filling].fill_(1)
            self.block_table_RB[filling, 0].fill_(self._scratch_block)
