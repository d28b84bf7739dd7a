"""Limits of a node's scheduler to our dataclasses and back; several proto files speak of them."""

from __future__ import annotations

from kvrelay.limits import DecodeLimits, PrefillLimits
from kvrelay.pb import types_pb2


def decode_limits_to_pb(limits: DecodeLimits) -> types_pb2.DecodeLimits:
    return types_pb2.DecodeLimits(
        max_batch=limits.max_batch,
        max_batched_tokens=limits.max_batched_tokens,
        max_requests=limits.max_requests,
        reserve_output_tokens=limits.reserve_output_tokens,
    )


def decode_limits_from_pb(wire: types_pb2.DecodeLimits) -> DecodeLimits:
    return DecodeLimits(wire.max_batch, wire.max_batched_tokens, wire.max_requests, wire.reserve_output_tokens)


def prefill_limits_to_pb(limits: PrefillLimits) -> types_pb2.PrefillLimits:
    return types_pb2.PrefillLimits(
        max_batched_tokens=limits.max_batched_tokens,
        chunk_tokens=limits.chunk_tokens,
        max_prefills=limits.max_prefills,
        max_waiting=limits.max_waiting,
    )


def prefill_limits_from_pb(wire: types_pb2.PrefillLimits) -> PrefillLimits:
    return PrefillLimits(wire.max_batched_tokens, wire.chunk_tokens, wire.max_prefills, wire.max_waiting)
