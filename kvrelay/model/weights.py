"""Reads a model from disk into a decoder: the native one where it runs, else the plain one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kvrelay.errors import ConfigError
from kvrelay.kv.cache import DTYPES, PagedKVCache
from kvrelay.model.attention_choice import choose_backend
from kvrelay.model.config import ModelConfig
from kvrelay.model.decoder import Decoder, DecoderLayer
from kvrelay.model.gguf_weights import GGUFWeights
from kvrelay.model.hf_weights import HFWeights
from kvrelay.model.linear import Linear, make_linear
from kvrelay.model.native import find_library
from kvrelay.model.native_decoder import unsupported
from kvrelay.model.native_weights import load_native
from kvrelay.model.pointwise import choose_pointwise
from kvrelay.model.rotary import RotaryTable
from kvrelay.model.step import StepInput
from kvrelay.model.weight_source import WeightForms, WeightSource, check_shape

_log = logging.getLogger(__name__)


class StepDecoder(Protocol):
    """What a runner needs of a decoder."""

    config: ModelConfig
    dtype: str
    backend_name: str

    def step(self, inp: StepInput, cache: PagedKVCache) -> Tensor: ...


def open_weights(path: Path) -> WeightSource:
    """A GGUF file or a Hugging Face directory. Raises ModelFileError naming what is missing, broken or not served."""
    return HFWeights(path) if path.is_dir() else GGUFWeights(path)


def load_decoder(
    path: Path,
    *,
    dtype: str,
    device: str = "cpu",
    weights: WeightForms = "file",
    num_threads: int = 0,
    decoder: str = "auto",
) -> tuple[ModelConfig, StepDecoder]:
    """A decoder from a GGUF file or a Hugging Face directory. `dtype` is a key of kvrelay.kv.cache.DTYPES.

    With `weights` "file", matrices that the file has quantised stay so, if the native decoder serves and knows the
    kind; with "dtype", and where that cannot be, weights become float32 first, then `dtype`; with "both" they are kept
    in both forms, and the quantised one computes as few rows as it is quicker for, if there are such (in bfloat16, with
    AVX-512). `num_threads` 0 takes as many as torch does. `decoder` is "auto", "native" (ConfigError where it cannot
    serve) or "torch". Raises ModelFileError naming what is missing, broken or not served.
    """
    source = open_weights(path)
    if device == "cpu" and decoder != "torch":
        library = find_library()
        reason = unsupported(source.config, dtype, library) if library else "there is none, see above"
        if library is not None and reason is None:
            num_threads = num_threads or torch.get_num_threads()
            return source.config, load_native(source, dtype, library, num_threads=num_threads, weights=weights)
        if decoder == "native":
            raise ConfigError(f"the native decoder cannot serve: {reason}; use --decoder auto or torch")
        if library is not None:
            _log.warning("the native decoder cannot serve this model (%s); serving with plain torch, slower", reason)
    elif decoder == "native":
        raise ConfigError(f"the native decoder runs on CPUs, and the device is {device}; use --decoder auto")
    if weights == "both":
        _log.warning("weights are kept in %s alone: plain torch computes with no quantised ones", dtype)
    return source.config, _Builder(source, DTYPES[dtype], device).decoder(dtype)


class _Builder:
    def __init__(self, source: WeightSource, dtype: torch.dtype, device: str) -> None:
        self._source = source
        self._config = source.config
        self._dtype = dtype
        self._device = device

    def decoder(self, dtype: str) -> Decoder:
        config = self._config
        embedding_VC = self._weight("model.embed_tokens", config.vocab_size, config.hidden_size)
        head_VC = embedding_VC
        if not config.tie_word_embeddings:
            head_VC = self._weight("lm_head", config.vocab_size, config.hidden_size)
        return Decoder(
            config,
            dtype,
            embedding_VC=embedding_VC,
            layers=[self._layer(f"model.layers.{index}") for index in range(config.num_layers)],
            norm_C=self._norm("model.norm"),
            lm_head=make_linear(head_VC),
            rotary=RotaryTable(config, self._dtype, self._device, self._source.rope_divisors()),
            attention=choose_backend(self._device, config, self._dtype),
            pointwise=choose_pointwise(self._device, self._dtype),
        )

    def _layer(self, at: str) -> DecoderLayer:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q, k, v = f"{at}.self_attn.q_proj", f"{at}.self_attn.k_proj", f"{at}.self_attn.v_proj"
        return DecoderLayer(
            attention_norm_C=self._norm(f"{at}.input_layernorm"),
            qkv=self._linear({q: num_q, k: num_kv, v: num_kv}, hidden),
            output=self._linear({f"{at}.self_attn.o_proj": hidden}, num_q),
            mlp_norm_C=self._norm(f"{at}.post_attention_layernorm"),
            gate_up=self._linear({f"{at}.mlp.gate_proj": inner, f"{at}.mlp.up_proj": inner}, hidden),
            down=self._linear({f"{at}.mlp.down_proj": hidden}, inner),
        )

    def _linear(self, outputs: dict[str, int], num_inputs: int) -> Linear:
        """One linear whose outputs are those of several, laid end to end."""
        return make_linear(torch.cat([self._weight(name, rows, num_inputs) for name, rows in outputs.items()]))

    def _norm(self, name: str) -> Tensor:
        return self._read(name, self._config.hidden_size).to(self._device)

    def _weight(self, name: str, *shape: int) -> Tensor:
        return self._read(name, *shape).to(self._device, self._dtype)

    def _read(self, name: str, *shape: int) -> Tensor:
        return check_shape(f"{name}.weight", self._source.tensor(f"{name}.weight"), shape)
