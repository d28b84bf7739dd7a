"""A Llama of any shape with random weights, made on the device: measuring speed needs no files."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrelay.kv.cache import DTYPES
from kvrelay.model.attention_choice import choose_backend
from kvrelay.model.config import ModelConfig
from kvrelay.model.decoder import Decoder, DecoderLayer
from kvrelay.model.linear import make_linear
from kvrelay.model.pointwise import choose_pointwise
from kvrelay.model.rotary import RotaryTable

LLAMA_3_1_8B = ModelConfig(
    architecture="llama",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128_256,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=None,
    max_model_len=32_768,
    tie_word_embeddings=False,
    eos_token_ids=(128_001,),
)
TINY = ModelConfig(
    architecture="llama",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=512,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    rope_scaling=None,
    max_model_len=4096,
    tie_word_embeddings=False,
    eos_token_ids=(2,),
)


def random_decoder(config: ModelConfig, dtype: str, device: str) -> Decoder:
    """Weights are normal with a deviation of 0.02, as models are initialised."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, columns: int) -> Tensor:
        weight = torch.empty(rows, columns, dtype=DTYPES[dtype], device=device)
        return weight.normal_(std=0.02, generator=generator)

    def norm() -> Tensor:
        return torch.ones(config.hidden_size, device=device)

    hidden, inner = config.hidden_size, config.intermediate_size
    num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layers = [
        DecoderLayer(
            attention_norm_C=norm(),
            qkv=make_linear(normal(num_q + 2 * num_kv, hidden)),
            output=make_linear(normal(hidden, num_q)),
            mlp_norm_C=norm(),
            gate_up=make_linear(normal(2 * inner, hidden)),
            down=make_linear(normal(hidden, inner)),
        )
        for _ in range(config.num_layers)
    ]
    return Decoder(
        config,
        dtype,
        embedding_VC=normal(config.vocab_size, hidden),
        layers=layers,
        norm_C=norm(),
        lm_head=make_linear(normal(config.vocab_size, hidden)),
        rotary=RotaryTable(config, DTYPES[dtype], device),
        attention=choose_backend(device, config, DTYPES[dtype]),
        pointwise=choose_pointwise(device, DTYPES[dtype]),
    )


def num_weights(config: ModelConfig) -> tuple[int, int]:
    """Of the matrices of all layers, and of the output matrix: what a step multiplies by."""
    per_layer = config.hidden_size * (
        (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim + 3 * config.intermediate_size
    )
    return config.num_layers * per_layer, config.vocab_size * config.hidden_size
