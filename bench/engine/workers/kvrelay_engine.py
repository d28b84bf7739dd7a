"""kvrelay's own engine without its nodes: schedule, run, update, as a prefill and a decode node do, in one process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import gguf

from bench.engine.case import Task
from bench.engine.worker import Prompts, work
from kvrelay.engine.batch import Batch, ScheduledRow
from kvrelay.engine.load import LoadedEngine, load_engine
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import BadLogitsError, ConfigError
from kvrelay.gguf_metadata import read_header
from kvrelay.kv.hashing import chain_root
from kvrelay.kv.layout import ITEM_BYTES
from kvrelay.messages import NodeRequest
from kvrelay.sampling import SamplingParams
from kvrelay.types import BlockId, RequestId
from prefill_node.config import PrefillConfig

BLOCK_TOKENS = 16


class KVRelayEngine:
    """Prompts run one after another in a prefill node's chunks, then all sequences decode together."""

    def __init__(self, task: Task) -> None:
        self._chunk_tokens = PrefillConfig(model=Path(task.model)).chunk_tokens
        self._num_blocks = task.num_blocks(BLOCK_TOKENS)
        self._loaded = _load(task, self._num_blocks)
        layout = self._loaded.info.layout
        self._root = chain_root(self._loaded.info.fingerprint, layout.fingerprint, b"")
        forms = {"file": ("",), "dtype": (task.dtype,), "both": ("", task.dtype)}[task.weights]
        self._weights_bytes = sum(_weights_bytes(Path(task.model), form) for form in forms)

    def generate(self, prompts: Prompts, num_tokens: int) -> Iterator[int]:
        blocks = map(BlockId, itertools.count())
        sequences = [self._sequence(prompt, num_tokens, blocks) for prompt in prompts]
        for sequence in sequences:
            while not sequence.num_output_tokens:
                yield self._step([ScheduledRow(sequence, min(sequence.num_uncomputed, self._chunk_tokens))])
        for _ in range(num_tokens - 1):
            yield self._step([ScheduledRow(sequence, 1) for sequence in sequences])

    def facts(self) -> dict[str, int | str]:
        info = self._loaded.info
        kv_bytes = self._num_blocks * info.layout.slab_bytes
        return {"weights_bytes": self._weights_bytes, "kv_bytes": kv_bytes, "decoder": info.attention_backend}

    def _sequence(self, prompt: list[int], num_tokens: int, blocks: Iterator[BlockId]) -> Sequence:
        sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=num_tokens, ignore_eos=True)
        request = NodeRequest(RequestId("bench"), tuple(prompt), len(prompt), sampling)
        sequence = Sequence.create(request, self._root, BLOCK_TOKENS)
        sequence.block_table = list(itertools.islice(blocks, -(-(len(prompt) + num_tokens) // BLOCK_TOKENS)))
        return sequence

    def _step(self, rows: list[ScheduledRow]) -> int:
        drawn = self._loaded.runner.run(Batch(tuple(rows)))
        for row, token in zip(rows, drawn, strict=True):
            row.sequence.num_computed_tokens += row.num_tokens
            if isinstance(token, BadLogitsError):
                raise token
            if token is not None:
                row.sequence.append(token.token_id)
        return sum(token is not None for token in drawn)


def _load(task: Task, num_blocks: int) -> LoadedEngine:
    """The file's own weights are what the row promises, and only the native decoder runs them: no other may step in."""
    decoder = "native" if task.weights != "dtype" and task.decoder == "auto" else task.decoder
    if task.weights != "dtype" and decoder == "torch":
        raise ConfigError("the torch decoder expands a file's quantised weights; leave --decoder out for them")
    return load_engine(
        Path(task.model),
        dtype=task.dtype,
        num_blocks=num_blocks,
        block_tokens=BLOCK_TOKENS,
        threads=task.threads,
        weights=task.weights,
        decoder=decoder,
    )


def _weights_bytes(model: Path, dtype: str) -> int:
    """Of the file's tensors: matrices in `dtype` (empty: as they are stored), norms as they are stored."""
    total = 0
    for place in read_header(model).tensors.values():
        if dtype and len(place.shape) > 1:
            total += math.prod(place.shape) * ITEM_BYTES[dtype]
        else:
            kind = gguf.GGMLQuantizationType(place.kind)
            total += math.prod(gguf.quant_shape_to_byte_shape(place.shape[::-1], kind))
    return total


if __name__ == "__main__":
    work(KVRelayEngine, "torch")
