"""Which attention backend a device gets."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch

from kvrelay.model.attention import AttentionBackend, BackendUnavailable
from kvrelay.model.attention_plain import PlainPagedAttention
from kvrelay.model.config import ModelConfig

logger = logging.getLogger(__name__)


def choose_backend(device: str, config: ModelConfig, dtype: torch.dtype) -> AttentionBackend:
    """Once, when a model is loaded. What was passed over, and why, is logged."""
    if torch.device(device).type != "cuda":
        return PlainPagedAttention()
    for make in (_varlen, _triton):
        try:
            backend = make(device, config, dtype)
        except BackendUnavailable as reason:
            logger.info("attention: %s", reason)
        else:
            logger.info("attention: %s", backend.name)
            return backend
    logger.warning("attention: plain, many times slower than this GPU; install triton for its kernel")
    return PlainPagedAttention()


def _varlen(device: str, config: ModelConfig, dtype: torch.dtype) -> AttentionBackend:
    # Brings torch's compiler with it: 70 MB and half a second that a node on a CPU can do without.
    from kvrelay.model.attention_varlen import VarlenPagedAttention

    return VarlenPagedAttention.probed(device, config, dtype)


def _triton(device: str, config: ModelConfig, dtype: torch.dtype) -> AttentionBackend:
    if find_spec("triton") is None:
        raise BackendUnavailable("triton is not installed")
    from kvrelay.model.attention_triton import TritonPagedAttention  # imports triton, which a CPU's torch comes without

    return TritonPagedAttention(config)
