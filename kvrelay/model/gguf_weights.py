"""Weights of a GGUF file, dequantised exactly or as they are.

llama.cpp's converter stores the rows of q and k so that rotary pairs are neighbours; they are put back here.
"""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvrelay.errors import ModelFileError
from kvrelay.gguf_metadata import TensorPlace, not_whole, read_header
from kvrelay.model.config import from_gguf
from kvrelay.model.weight_source import Quantization, QuantizedMatrix

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_COMPUTABLE: dict[gguf.GGMLQuantizationType, Quantization] = {
    gguf.GGMLQuantizationType.Q4_1: "Q4_1",
    gguf.GGMLQuantizationType.Q8_0: "Q8_0",
}


class GGUFWeights:
    """One GGUF file, read a tensor at a time: pages of a mapped file would count as the node's memory.

    Raises ModelFileError if it is missing, truncated or of an unserved kind.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        header = read_header(path)
        self._tensors = header.tensors
        self._num_bytes = path.stat().st_size
        for name in self._tensors:
            self._place(name)
        embedding = self._find("token_embd.weight")
        self.config = from_gguf(
            header.metadata,
            vocab_size=embedding.shape[-1],
            tie_word_embeddings="output.weight" not in self._tensors,
        )

    def tensor(self, name: str) -> Tensor:
        return self._in_order(name, self._read(_gguf_name(name)))

    def quantized(self, name: str) -> QuantizedMatrix | None:
        data, kind = self._stored(_gguf_name(name))
        name_of_kind = _COMPUTABLE.get(kind)
        if name_of_kind is None:
            return None
        return QuantizedMatrix(name_of_kind, self._in_order(name, torch.from_numpy(data)))

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        if name.endswith("q_proj.weight"):
            return _unpermute(rows, self.config.num_heads)
        if name.endswith("k_proj.weight"):
            return _unpermute(rows, self.config.num_kv_heads)
        return rows

    def rope_divisors(self) -> Tensor | None:
        return self._read("rope_freqs.weight") if "rope_freqs.weight" in self._tensors else None

    def _find(self, name: str) -> TensorPlace:
        if name not in self._tensors:
            raise ModelFileError(f"{self._path} has no tensor {name}")
        return self._tensors[name]

    def _read(self, name: str) -> Tensor:
        data, kind = self._stored(name)
        try:
            values = gguf.dequantize(data, kind)
        except NotImplementedError:
            raise ModelFileError(f"{self._path}: tensor {name} is {kind.name}, which cannot be dequantised") from None
        return torch.from_numpy(np.require(values, np.float32, ("C", "W")))

    def _stored(self, name: str) -> tuple[npt.NDArray[np.uint8], gguf.GGMLQuantizationType]:
        """A tensor's bytes, slowest axis first, the last axis packed as its type packs it."""
        start, shape, kind = self._place(name)
        data = np.fromfile(self._path, np.uint8, count=math.prod(shape), offset=start)
        if len(data) < math.prod(shape):
            raise not_whole(self._path, f"tensor {name} was cut off while the file was read")
        return data.reshape(shape), kind

    def _place(self, name: str) -> tuple[int, tuple[int, ...], gguf.GGMLQuantizationType]:
        """Where a tensor starts, its shape in bytes, and its type."""
        place = self._find(name)
        try:
            kind = gguf.GGMLQuantizationType(place.kind)
            shape = gguf.quant_shape_to_byte_shape(place.shape[::-1], kind)
        except (ValueError, IndexError) as error:
            raise ModelFileError(f"{self._path}: tensor {name} is damaged or of an unknown type: {error}") from error
        end = place.start + math.prod(shape)
        if end > self._num_bytes:
            raise not_whole(self._path, f"tensor {name} ends at byte {end}, the file at {self._num_bytes}")
        return place.start, shape, kind


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def _unpermute(weight_OI: Tensor, num_heads: int) -> Tensor:
    """Rows (head, pair, half) -> (head, half, pair)."""
    rows, columns = weight_OI.shape
    return weight_OI.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
