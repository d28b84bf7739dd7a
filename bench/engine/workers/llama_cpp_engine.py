"""llama.cpp through the C API that llama-cpp-python binds: batches over several sequences, flash attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import llama_cpp
import numpy as np

from bench.engine.case import Task
from bench.engine.worker import Prompts, work

BATCH_TOKENS = 2048
MICRO_BATCH_TOKENS = 512  # its default
CELL_MULTIPLE = 256  # it rounds a sequence's cache up to this


class LlamaCppEngine:
    """A context for each shape of case, as its own batched benchmark does: a sequence has its own cache in it."""

    def __init__(self, task: Task) -> None:
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(task.model.encode(), parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {task.model}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._threads = task.threads
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._shape = (0, 0)
        self._context: Any = None

    def generate(self, prompts: Prompts, num_tokens: int) -> Iterator[int]:
        self._prepare(len(prompts), len(prompts[0]) + num_tokens)
        positions = [len(prompt) for prompt in prompts]
        last = []
        for sequence, prompt in enumerate(prompts):
            last += self._decode([(token, at, sequence) for at, token in enumerate(prompt)], [len(prompt) - 1])
            yield 1
        for _ in range(num_tokens - 1):
            rows = [(token, at, sequence) for sequence, (token, at) in enumerate(zip(last, positions, strict=True))]
            last = self._decode(rows, range(len(rows)))
            positions = [at + 1 for at in positions]
            yield len(last)

    def facts(self) -> dict[str, int | str]:
        return {}

    def _prepare(self, num_sequences: int, max_len: int) -> None:
        """Makes a context of this shape, or clears the one there is."""
        if self._shape != (num_sequences, max_len):
            if self._context:
                llama_cpp.llama_free(self._context)
            self._context = self._make_context(num_sequences, -(-max_len // CELL_MULTIPLE) * CELL_MULTIPLE)
            self._shape = (num_sequences, max_len)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)

    def _make_context(self, num_sequences: int, cells: int) -> Any:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = num_sequences * cells
        parameters.n_batch = BATCH_TOKENS
        parameters.n_ubatch = MICRO_BATCH_TOKENS
        parameters.n_seq_max = num_sequences
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        parameters.kv_unified = False
        parameters.no_perf = True
        context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not context:
            raise RuntimeError(f"llama.cpp cannot make a context of {num_sequences} sequences of {cells} tokens")
        return context

    def _decode(self, rows: list[tuple[int, int, int]], wanted: Sequence[int]) -> list[int]:
        """Runs (token, position, sequence) rows; gives the likeliest next token of each wanted one."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = False
        for index in wanted:
            batch.logits[index] = True
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode of {len(rows)} tokens gives {status}")
        logits = llama_cpp.llama_get_logits(self._context)
        shape = (len(wanted), self._vocab_size)
        return np.ctypeslib.as_array(logits, shape=shape).argmax(axis=1).tolist()  # type: ignore[no-any-return]


if __name__ == "__main__":
    work(LlamaCppEngine, "llama-cpp-python")
