"""The same weights in each engine's own format, all from one GGUF file: its quantised weights, expanded.

llama.cpp reads a bfloat16 GGUF, OpenVINO a float16 one, vLLM and transformers a Hugging Face directory of bfloat16
safetensors. They are made once and kept beside the peers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvrelay.model.config import ModelConfig
from kvrelay.model.gguf_weights import GGUFWeights

_FILE_TYPES = {
    gguf.GGMLQuantizationType.BF16: gguf.LlamaFileType.MOSTLY_BF16,
    gguf.GGMLQuantizationType.F16: gguf.LlamaFileType.MOSTLY_F16,
}
_WRITTEN_BY_WRITER = ("general.architecture", "general.file_type", "general.quantization_version")


@dataclass(frozen=True, slots=True)
class DerivedModels:
    bf16_gguf: Path
    f16_gguf: Path
    hf_directory: Path


def derive(source: Path, directory: Path) -> DerivedModels:
    """Makes what is missing in `directory`. A file gets its final name only when it is whole."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = source.name.removesuffix(".gguf").rpartition(".")[0] or source.stem
    models = DerivedModels(
        directory / f"{stem}.BF16.gguf", directory / f"{stem}.F16.gguf", directory / f"{stem}-bfloat16"
    )
    if not models.bf16_gguf.exists():
        _expand(source, models.bf16_gguf, gguf.GGMLQuantizationType.BF16)
    if not models.f16_gguf.exists():
        _expand(source, models.f16_gguf, gguf.GGMLQuantizationType.F16)
    if not models.hf_directory.exists():
        _write_hf(source, models.hf_directory)
    return models


def _expand(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Matrices become `kind`, norms stay float32, as llama.cpp's converter writes them."""
    reader = gguf.GGUFReader(source)
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in _WRITTEN_BY_WRITER:
            continue
        element_type = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], element_type)
    writer.add_file_type(_FILE_TYPES[kind])
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        stored = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(target)


def _write_hf(source: Path, target: Path) -> None:
    weights = GGUFWeights(source)
    part = target.with_name(f"{target.name}.part")
    part.mkdir(exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in _hf_tensors(weights)}
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    (part / "config.json").write_text(json.dumps(_hf_config(weights.config), indent=2))
    part.replace(target)


def _hf_tensors(weights: GGUFWeights) -> Iterator[tuple[str, Tensor]]:
    names = ["model.embed_tokens", "model.norm", *([] if weights.config.tie_word_embeddings else ["lm_head"])]
    for layer in range(weights.config.num_layers):
        at = f"model.layers.{layer}"
        names += [f"{at}.{norm}" for norm in ("input_layernorm", "post_attention_layernorm")]
        names += [f"{at}.self_attn.{part}_proj" for part in "qkvo"]
        names += [f"{at}.mlp.{part}_proj" for part in ("gate", "up", "down")]
    for name in names:
        yield f"{name}.weight", weights.tensor(f"{name}.weight")


def _hf_config(config: ModelConfig) -> dict[str, object]:
    if config.rope_scaling is not None:
        raise ValueError(f"rotary scaling {config.rope_scaling} would be lost; benchmark a model without")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
        "eos_token_id": list(config.eos_token_ids),
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }
