"""The tiny model of `tiny_model` as a GGUF file, written the way llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

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
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def make_tiny_gguf(
    source: Path,
    path: Path,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    without: tuple[str, ...] = (),
    metadata: dict[str, str | int | float] | None = None,
    extra: dict[str, Tensor] | None = None,
) -> Path:
    """Writes the directory `source` of make_tiny_model as one GGUF file at `path`.

    Matrices get `kind`; tensors named in `without` (GGUF names) are left out, `extra` ones added; `metadata` wins
    over what the config gives.
    """
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    defaults = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.rope.dimension_count": config["head_dim"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }
    for name, value in (defaults | (metadata or {})).items():
        _add(writer, name, value)
    for name, tensor in load_file(source / "model.safetensors").items():
        stored = _permute(tensor, _num_heads(name, config)) if ("q_proj" in name or "k_proj" in name) else tensor
        if _gguf_name(name) not in without:
            _add_tensor(writer, _gguf_name(name), stored, kind)
    for name, tensor in (extra or {}).items():
        _add_tensor(writer, name, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, value: str | int | float) -> None:
    if isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    else:
        writer.add_float32(name, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: gguf.GGMLQuantizationType) -> None:
    values = tensor.numpy().astype(np.float32)
    if tensor.dim() == 1 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)


def _num_heads(name: str, config: dict[str, int]) -> int:
    return config["num_attention_heads"] if "q_proj" in name else config["num_key_value_heads"]


def _permute(weight: Tensor, num_heads: int) -> Tensor:
    """The two rows of a rotary pair become neighbours."""
    by_half = weight.unflatten(0, (num_heads, 2, -1))
    return torch.stack((by_half[:, 0], by_half[:, 1]), dim=2).flatten(0, 2).contiguous()


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    parts = name.split(".")
    return f"blk.{parts[2]}.{_LAYER_NAMES['.'.join(parts[3:-1])]}.weight"
