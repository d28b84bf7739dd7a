"""Loads a model and makes what an engine runs on: weights, paged cache, pool, runner."""

from __future__ import annotations

import logging
import mmap
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from kvrelay.cluster import ModelInfo
from kvrelay.engine.runner import ModelRunner
from kvrelay.errors import ConfigError
from kvrelay.kv.cache import PagedKVCache
from kvrelay.kv.frame import HEADER_BYTES
from kvrelay.kv.layout import KVLayout
from kvrelay.kv.pool import BlockPool
from kvrelay.model.config import ModelConfig
from kvrelay.model.fingerprint import model_fingerprint
from kvrelay.model.graphs import with_graphs
from kvrelay.model.sampler import Sampler
from kvrelay.model.weight_source import WeightForms
from kvrelay.model.weights import load_decoder
from kvrelay.rpc.channel import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """Everything but a scheduler. Belongs to the engine thread; `info` is anyone's."""

    info: ModelInfo
    runner: ModelRunner
    cache: PagedKVCache
    pool: BlockPool


def load_engine(
    model: Path,
    *,
    name: str = "",
    dtype: str = "bfloat16",
    num_blocks: int = 0,
    kv_bytes: int = 0,
    block_tokens: int = 16,
    threads: int = 0,
    device: str = "cpu",
    weights: WeightForms = "file",
    decoder: str = "auto",
    max_decode_rows: int = 0,
    memory: mmap.mmap | None = None,
) -> LoadedEngine:
    """Loads `model` (a GGUF file or a Hugging Face directory) and runs it once.

    The pool gets `num_blocks` blocks, or as many as fit into `kv_bytes` if that is 0. `threads` 0 leaves torch's own
    choice; `device` is "cpu", "cuda" or "auto"; `weights` and `decoder` are as for `load_decoder`. Decode steps of up
    to `max_decode_rows` sequences are recorded for the GPU (a node that decodes nothing names none). `memory`
    is for the cache (see PagedKVCache). Raises ModelFileError or ConfigError, saying what is wrong.
    """
    started = time.monotonic()
    device = _device(device)
    if threads:
        torch.set_num_threads(threads)
    config, model_decoder = load_decoder(
        model, dtype=dtype, device=device, weights=weights, num_threads=threads, decoder=decoder
    )
    layout = config.layout(dtype, block_tokens)
    _check_message_size(layout)
    num_blocks = num_blocks or _blocks_in(kv_bytes, layout)
    cache = PagedKVCache(layout, num_blocks, device, memory=memory)
    runner = ModelRunner(
        with_graphs(model_decoder, cache, max_decode_rows),
        *(cache, Sampler(), config.eos_token_ids),
        block_tokens=layout.block_tokens,
        device=device,
    )
    info = _model_info(model, name, config, layout, model_decoder.backend_name)
    loaded_s = time.monotonic() - started
    runner.warm_up()
    logger.info(
        "serving %s (%s, %s): loaded in %.1f s, warm after %.1f s; %d blocks of %d tokens, %.0f MiB of KV",
        *(info.name, dtype, info.attention_backend, loaded_s, time.monotonic() - started),
        *(num_blocks, layout.block_tokens, num_blocks * layout.slab_bytes / MIB),
    )
    return LoadedEngine(info=info, runner=runner, cache=cache, pool=BlockPool(num_blocks))


def _device(wanted: str) -> str:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("device is cuda, and torch finds no GPU; use --device cpu or auto")
    return wanted if wanted != "auto" else "cuda" if available else "cpu"


def _check_message_size(layout: KVLayout) -> None:
    """A block travels as one message to the store and back: found out now, not by every block."""
    most = MAX_MESSAGE_BYTES - HEADER_BYTES
    if layout.slab_bytes > most:
        raise ConfigError(
            f"a block of {layout.block_tokens} tokens has {layout.slab_bytes} bytes of KV, and a message carries "
            f"{most}; lower --block-tokens to {most // layout.token_bytes} or less, on every node"
        )


def _blocks_in(kv_bytes: int, layout: KVLayout) -> int:
    num_blocks = kv_bytes // layout.slab_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"kv_bytes is {kv_bytes}, less than one block of {layout.slab_bytes} bytes; "
            "raise --kv-bytes or set --num-blocks"
        )
    return num_blocks


def _model_info(model: Path, name: str, config: ModelConfig, layout: KVLayout, backend: str) -> ModelInfo:
    return ModelInfo(
        name=name or (model.stem if model.is_file() else model.name),
        fingerprint=model_fingerprint(model),
        architecture=config.architecture,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        layout=layout,
        dtype=layout.dtype,
        attention_backend=backend,
    )
