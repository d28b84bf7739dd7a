"""What a gateway asks of the cluster besides answers: its model, its settings, its load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from smg_grpc_proto import vllm_engine_pb2

from kvrelay.cluster import ModelInfo, NodeStatus
from kvrelay.limits import DecodeLimits

SERVER_TYPE = "vllm-grpc"  # what gateways know this protocol by
_FIRST_TOKEN = "first_token"  # where structured output begins, also within a model's thoughts


def model_info_to_pb(model: ModelInfo, path: str, bos_token_id: int | None) -> Any:
    eos_token_ids = list(model.eos_token_ids)
    return vllm_engine_pb2.GetModelInfoResponse(
        model_path=path,
        tokenizer_path=path,
        is_generation=True,
        max_context_length=model.max_model_len,
        max_req_input_len=model.max_model_len - 1,  # an answer has one token at least
        vocab_size=model.vocab_size,
        served_model_name=model.name,
        model_type=model.architecture,
        eos_token_ids=eos_token_ids,
        pad_token_id=next(iter(eos_token_ids), 0),
        bos_token_id=bos_token_id or 0,
    )


def server_info_to_pb(
    model: ModelInfo, decode: Iterable[NodeStatus], *, num_open: int, is_paused: bool, uptime_s: float
) -> Any:
    return vllm_engine_pb2.GetServerInfoResponse(
        active_requests=num_open,
        is_paused=is_paused,
        uptime_seconds=uptime_s,
        server_type=SERVER_TYPE,
        data_parallel_size=1,
        kv_cache_dtype=model.dtype,
        block_size=model.layout.block_tokens,
        attention_backend=model.attention_backend,
        model_dtype=model.dtype,
        max_num_seqs=most_running(decode),
        constrained_decoding_start=_FIRST_TOKEN,
    )


def loads_to_pb(
    decode: Sequence[NodeStatus],
    prefill: Iterable[NodeStatus],
    *,
    block_tokens: int,
    num_waiting: int,
    num_open: int,
    now: datetime,
    version: str,
) -> Any:
    """The whole cluster as one rank; KV memory is the decode nodes', where a request stays longest."""
    total = sum(status.blocks.total for status in decode)
    used = sum(status.blocks.reserved + status.blocks.held for status in decode)
    load = vllm_engine_pb2.SchedulerLoad(
        num_running_reqs=num_open - num_waiting,
        num_waiting_reqs=num_waiting,
        num_total_reqs=num_open,
        num_used_tokens=used * block_tokens,
        max_total_num_tokens=total * block_tokens,
        token_usage=used / total if total else 0.0,
        max_running_requests=most_running(decode),
        num_waiting_uncached_tokens=sum(status.num_waiting_tokens for status in prefill),
    )
    return vllm_engine_pb2.GetLoadsResponse(timestamp=now.isoformat(), version=version, dp_rank_count=1, loads=[load])


def most_running(decode: Iterable[NodeStatus]) -> int:
    """Sequences that all decode nodes together take into their batches."""
    return sum(status.limits.max_batch for status in decode if isinstance(status.limits, DecodeLimits))
