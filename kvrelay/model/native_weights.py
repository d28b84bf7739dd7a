"""Fills a native decoder from a model file, matrix by matrix: no more than one of them is in memory twice."""

from __future__ import annotations

import ctypes
import logging

import torch
from torch import Tensor

from kvrelay.errors import ModelFileError
from kvrelay.kv.cache import DTYPES
from kvrelay.model.native import Library
from kvrelay.model.native_decoder import KINDS, QUANTIZATION_BLOCK, Kind, NativeDecoder, Part
from kvrelay.model.rotary import cos_and_sin
from kvrelay.model.weight_source import QuantizedMatrix, WeightForms, WeightSource, check_shape

_log = logging.getLogger(__name__)

_BLOCK_BYTES = {"Q4_1": 20, "Q8_0": 34}


def load_native(
    source: WeightSource, dtype: str, library: Library, *, num_threads: int, weights: WeightForms
) -> NativeDecoder:
    """`weights` is as for kvrelay.model.weights.load_decoder. Raises ModelFileError."""
    if weights == "both" and not (library.multiplies_quantized and dtype == "bfloat16"):
        _log.info("weights are kept in %s alone: quantised ones are quicker in bfloat16 with AVX-512 only", dtype)
        weights = "dtype"
    decoder = NativeDecoder(source.config, dtype, library, num_threads=num_threads)
    _Filler(source, decoder, DTYPES[dtype], weights).fill()
    return decoder


class _Filler:
    def __init__(self, source: WeightSource, decoder: NativeDecoder, dtype: torch.dtype, weights: WeightForms) -> None:
        self._source = source
        self._config = source.config
        self._decoder = decoder
        self._dtype = dtype
        self._weights = weights

    def fill(self) -> None:
        config = self._config
        embedding = {"model.embed_tokens": config.vocab_size}
        if config.tie_word_embeddings:
            self._matrix(0, Part.HEAD, embedding, config.hidden_size)
        else:
            self._matrix(0, Part.EMBEDDING, embedding, config.hidden_size)
            self._matrix(0, Part.HEAD, {"lm_head": config.vocab_size}, config.hidden_size)
        _trim_heap()
        for layer in range(config.num_layers):
            self._layer(layer, f"model.layers.{layer}")
        _trim_heap()
        self._norm(0, Part.HEAD, "model.norm")
        self._decoder.set_rotary(*cos_and_sin(config, self._source.rope_divisors()))

    def _layer(self, layer: int, at: str) -> None:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q, k, v = f"{at}.self_attn.q_proj", f"{at}.self_attn.k_proj", f"{at}.self_attn.v_proj"
        self._norm(layer, Part.QKV, f"{at}.input_layernorm")
        self._matrix(layer, Part.QKV, {q: num_q, k: num_kv, v: num_kv}, hidden)
        self._matrix(layer, Part.OUTPUT, {f"{at}.self_attn.o_proj": hidden}, num_q)
        self._norm(layer, Part.GATE_UP, f"{at}.post_attention_layernorm")
        self._matrix(layer, Part.GATE_UP, {f"{at}.mlp.gate_proj": inner, f"{at}.mlp.up_proj": inner}, hidden)
        self._matrix(layer, Part.DOWN, {f"{at}.mlp.down_proj": hidden}, inner)

    def _matrix(self, layer: int, part: Part, outputs: dict[str, int], num_inputs: int) -> None:
        """One matrix whose outputs are those of several, laid end to end."""
        quantized = self._quantized(outputs, num_inputs)
        if quantized is not None:
            self._decoder.set_matrix(layer, part, Kind[quantized.kind], quantized.rows, num_inputs)
            if self._weights == "file":
                return
        rows = [self._read(name, num_rows, num_inputs).to(self._dtype) for name, num_rows in outputs.items()]
        self._decoder.set_matrix(layer, part, KINDS[self._dtype], _end_to_end(rows), num_inputs)

    def _quantized(self, outputs: dict[str, int], num_inputs: int) -> QuantizedMatrix | None:
        """All of them as the file has them, if they are of one kind."""
        if self._weights == "dtype" or num_inputs % QUANTIZATION_BLOCK:
            return None
        parts = [self._source.quantized(f"{name}.weight") for name in outputs]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts) or len({part.kind for part in found}) > 1:
            return None
        kind = found[0].kind
        row_bytes = num_inputs // QUANTIZATION_BLOCK * _BLOCK_BYTES[kind]
        for (name, num_rows), part in zip(outputs.items(), found, strict=True):
            if tuple(part.rows.shape) != (num_rows, row_bytes):
                raise ModelFileError(
                    f"tensor {name}.weight is {kind} with {list(part.rows.shape)} rows and bytes a row; "
                    f"the config says {[num_rows, row_bytes]}"
                )
        return QuantizedMatrix(kind, _end_to_end([part.rows for part in found]))

    def _norm(self, layer: int, part: Part, name: str) -> None:
        self._decoder.set_norm(layer, part, self._read(name, self._config.hidden_size))

    def _read(self, name: str, *shape: int) -> Tensor:
        return check_shape(f"{name}.weight", self._source.tensor(f"{name}.weight"), shape)


def _trim_heap() -> None:
    """Gives back what copies of matrices took: the allocator would keep a good hundred megabytes of it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc; others do not hold on to as much
    if trim is not None:
        trim(0)


def _end_to_end(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)
