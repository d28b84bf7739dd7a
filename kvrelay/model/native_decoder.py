"""The decoder as one native call a step. `kvrelay.model.decoder` is its plain form, and its reference."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from kvrelay.kv.cache import DTYPES, PagedKVCache
from kvrelay.model.config import ModelConfig
from kvrelay.model.native import Library, Shape, Step
from kvrelay.model.step import StepInput


class Part(IntEnum):
    """Matrices of a layer, and two of the model."""

    QKV = 0
    OUTPUT = 1
    GATE_UP = 2
    DOWN = 3
    HEAD = 4
    EMBEDDING = 5  # set only when it is not the head


class Kind(IntEnum):
    """How a matrix's rows are stored; the last two are GGUF's."""

    F32 = 0
    BF16 = 1
    Q8_0 = 2
    Q4_1 = 3


KINDS = {torch.float32: Kind.F32, torch.bfloat16: Kind.BF16}
QUANTIZATION_BLOCK = 32


def unsupported(config: ModelConfig, dtype: str, library: Library) -> str | None:
    """Why this library cannot run a model, or None if it can."""
    if DTYPES[dtype] not in KINDS:
        return f"it computes in {' or '.join(str(d).removeprefix('torch.') for d in KINDS)}, not in {dtype}"
    columns = library.panel_columns
    sizes = {"head_dim": columns, "hidden_size": columns // 2, "intermediate_size": columns // 2}
    for name, step in sizes.items():
        if getattr(config, name) % step:
            return f"{name} is {getattr(config, name)}, not a multiple of {step}"
    return None


class NativeDecoder:
    """Runs `step` on `num_threads` threads, the caller's among them. Belongs to the engine thread."""

    def __init__(self, config: ModelConfig, dtype: str, library: Library, *, num_threads: int) -> None:
        """Weights are to be set before the first step. MemoryError if there is none left."""
        self.config = config
        self.dtype = dtype
        self.backend_name = f"native-{library.name}"
        self._library = library
        shape = Shape(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            is_bfloat16=dtype == "bfloat16",
            num_threads=num_threads,
            max_positions=config.max_model_len,
            rms_norm_eps=config.rms_norm_eps,
        )
        self._model = ctypes.c_void_p(library.create(shape))
        if not self._model:
            raise MemoryError(f"there is no memory for the decoder, or no room for {num_threads} threads")

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            self._library.destroy(self._model)

    def set_matrix(self, layer: int, part: Part, kind: Kind, rows: Tensor, num_inputs: int) -> None:
        """Copies a matrix in, rows being its outputs: [outputs, ...] of `kind`. GATE_UP: gates, then ups."""
        rows = rows.contiguous()
        if self._library.set_matrix(self._model, layer, part, kind, len(rows), num_inputs, rows.data_ptr()):
            raise MemoryError("there is no memory for the model's weights")

    def set_norm(self, layer: int, part: Part, weight_C: Tensor) -> None:
        """Float32 weights: of a layer's attention (QKV) or MLP (GATE_UP), or of the last norm (HEAD)."""
        weight_C = weight_C.contiguous()
        if self._library.set_norm(self._model, layer, part, weight_C.data_ptr()):
            raise MemoryError("there is no memory for the model's weights")

    def set_rotary(self, cos: Tensor, sin: Tensor) -> None:
        """Float32 [max_model_len, head_dim / 2] each."""
        cos, sin = cos.contiguous(), sin.contiguous()
        if self._library.set_rotary(self._model, cos.data_ptr(), sin.data_ptr()):
            raise MemoryError("there is no memory for the rotary table")

    @torch.inference_mode()
    def step(self, inp: StepInput, cache: PagedKVCache) -> Tensor:
        """Writes K and V of the step's T tokens into the cache; returns logits, float32 [N, V].

        Token ids and slots are the caller's to keep in range. ValueError for a context beyond max_model_len.
        """
        longest = max(inp.context_lens, default=0)
        if longest > self.config.max_model_len:
            raise ValueError(f"a context of {longest} tokens; allowed are {self.config.max_model_len}")
        logits_NV = torch.empty(len(inp.logit_rows_N), self.config.vocab_size)
        query_starts, context_lens = _int32s(inp.query_starts), _int32s(inp.context_lens)
        step = Step(
            num_tokens=len(inp.token_ids_T),
            num_rows=inp.num_rows,
            num_logits=len(logits_NV),
            block_tokens=cache.layout.block_tokens,
            table_width=inp.block_table_RB.shape[1],
            token_ids=inp.token_ids_T.data_ptr(),
            slots=inp.slot_mapping_T.data_ptr(),
            query_starts=ctypes.addressof(query_starts),
            context_lens=ctypes.addressof(context_lens),
            block_table=inp.block_table_RB.data_ptr(),
            logit_rows=inp.logit_rows_N.data_ptr(),
            cache=cache.tensor.data_ptr(),
            logits=logits_NV.data_ptr(),
        )
        if self._library.step(self._model, step):
            raise MemoryError(f"there is no memory for a step of {step.num_tokens} tokens")
        return logits_NV


def _int32s(values: Sequence[int]) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * len(values))(*values)
