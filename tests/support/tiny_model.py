"""A tiny random Llama in the Hugging Face layout, made in milliseconds: the model of tests that need no real text.

Its tokenizer is byte-level BPE without merges, so any text is its UTF-8 bytes: ids 0, 1, 2 are `<|endoftext|>`,
`<|im_start|>` and `<|im_end|>`, and 256 bytes follow. Ids above those exist in the model only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.byte_tokenizer import EOS_TOKEN_ID, VOCAB_SIZE, make_byte_tokenizer


def make_tiny_model(
    directory: Path,
    seed: int = 0,
    *,
    vocab_size: int = 288,
    num_layers: int = 2,
    hidden_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    intermediate_size: int = 128,
    max_model_len: int = 1024,
    tie_word_embeddings: bool = True,
    rope_scaling: dict[str, Any] | None = None,
) -> Path:
    """Writes config, weights and tokenizer files into `directory` (made if missing) and returns it.

    The same arguments give the same bytes. Weights are float32, wide enough that greedy margins are not near-ties.
    """
    assert vocab_size >= VOCAB_SIZE, f"the tokenizer alone has {VOCAB_SIZE} ids"
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": tie_word_embeddings,
        "vocab_size": vocab_size,
        "bos_token_id": 0,
        "eos_token_id": EOS_TOKEN_ID,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file(_random_tensors(config, seed), directory / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(directory, max_model_len)
    return directory


def _random_tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    num_q, num_kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    tensors = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden, std=0.5),
        "model.norm.weight": 1.0 + normal(hidden, std=0.1),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        tensors[at + "input_layernorm.weight"] = 1.0 + normal(hidden, std=0.1)
        tensors[at + "self_attn.q_proj.weight"] = normal(num_q, hidden, std=0.2)
        tensors[at + "self_attn.k_proj.weight"] = normal(num_kv, hidden, std=0.2)
        tensors[at + "self_attn.v_proj.weight"] = normal(num_kv, hidden, std=0.2)
        tensors[at + "self_attn.o_proj.weight"] = normal(hidden, num_q, std=0.2)
        tensors[at + "post_attention_layernorm.weight"] = 1.0 + normal(hidden, std=0.1)
        tensors[at + "mlp.gate_proj.weight"] = normal(inner, hidden, std=0.2)
        tensors[at + "mlp.up_proj.weight"] = normal(inner, hidden, std=0.2)
        tensors[at + "mlp.down_proj.weight"] = normal(hidden, inner, std=0.2)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(config["vocab_size"], hidden, std=0.5)
    return tensors


def _write_tokenizer(directory: Path, max_model_len: int) -> None:
    make_byte_tokenizer(
        directory,
        tokenizer_class="PreTrainedTokenizerFast",
        add_bos_token=False,
        model_max_length=max_model_len,
    )
