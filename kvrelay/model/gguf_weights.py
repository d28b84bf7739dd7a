"""Weights of a GGUF file, dequantised exactly.

llama.cpp's converter stores the rows of q and k so that rotary pairs are neighbours; they are put back here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from kvrelay.errors import ModelFileError
from kvrelay.model.config import from_gguf

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


class GGUFWeights:
    """One GGUF file, memory-mapped; raises ModelFileError if it is missing, truncated or of an unserved kind."""

    def __init__(self, path: Path) -> None:
        self._path = path
        reader = _open(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        metadata = {name: field.contents() for name, field in reader.fields.items() if not _is_vocabulary(name)}
        embedding = self._find("token_embd.weight")
        self.config = from_gguf(
            metadata,
            vocab_size=int(embedding.shape[1]),
            tie_word_embeddings="output.weight" not in self._tensors,
        )

    def tensor(self, name: str) -> Tensor:
        weight = self._read(_gguf_name(name))
        if name.endswith("q_proj.weight"):
            return _unpermute(weight, self.config.num_heads)
        if name.endswith("k_proj.weight"):
            return _unpermute(weight, self.config.num_kv_heads)
        return weight

    def rope_divisors(self) -> Tensor | None:
        return self._read("rope_freqs.weight") if "rope_freqs.weight" in self._tensors else None

    def _find(self, name: str) -> Any:
        if name not in self._tensors:
            raise ModelFileError(f"{self._path} has no tensor {name}")
        return self._tensors[name]

    def _read(self, name: str) -> Tensor:
        stored = self._find(name)
        try:
            values = gguf.dequantize(stored.data, stored.tensor_type)
        except NotImplementedError:
            kind = stored.tensor_type.name
            raise ModelFileError(f"{self._path}: tensor {name} is {kind}, which cannot be dequantised") from None
        return torch.from_numpy(np.array(values, dtype=np.float32))


def _open(path: Path) -> Any:
    if not path.is_file():
        raise ModelFileError(f"there is no model file {path}")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        # The reader has no errors of its own: these are what it stumbles over when bytes are missing or wrong.
        raise ModelFileError(f"{path} is not a whole GGUF file (truncated download?): {error}") from error


def _is_vocabulary(name: str) -> bool:
    """The token lists are long and only the tokenizer's affair."""
    return name.startswith("tokenizer.") and not name.endswith("_token_id")


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def _unpermute(weight_OI: Tensor, num_heads: int) -> Tensor:
    """Rows (head, pair, half) -> (head, half, pair)."""
    rows, columns = weight_OI.shape
    return weight_OI.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
