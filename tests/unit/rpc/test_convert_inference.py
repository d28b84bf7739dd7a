"""Requests and events of inference.proto survive the wire; n's default on the wire is one answer."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.errors import InvalidRequestError
from kvrelay.inference import (
    ChoiceFinished,
    GenerateEvent,
    GenerateRequest,
    RequestAccepted,
    RequestFailed,
    RequestFinished,
    TextPrompt,
    Timing,
    TokensGenerated,
    Usage,
)
from kvrelay.pb import inference_pb2
from kvrelay.rpc import convert_inference
from kvrelay.sampling import GeneratedToken, StepLogprobs, TokenLogprob
from kvrelay.types import CachedTokens, FinishReason, RequestId

STEP = StepLogprobs(TokenLogprob(5, -0.5), (TokenLogprob(5, -0.5), TokenLogprob(6, -2.0)))
EVENTS: list[GenerateEvent] = [
    RequestAccepted(RequestId("r"), 100, 2**64 - 1, 40),
    TokensGenerated((GeneratedToken(5), GeneratedToken(6)), "ab"),
    TokensGenerated((GeneratedToken(5, STEP),), "a", index=127),
    ChoiceFinished(3, FinishReason.STOP, "\n\n", 17),
    RequestFinished(
        FinishReason.LENGTH,
        Usage(100, 45, CachedTokens(device=16, memory=32, disk=48)),
        Timing(0.125, 0.25, 1.0, 0.5, 0.0625),
        prefill_node="a:1",
        decode_node="b:2",
        handoff_bytes=2**40,
        stop_string="x",
        retries=2,
        prefix_hash=bytes(range(32)),
    ),
    RequestFailed("unavailable", "gone", retryable=True, retry_after_s=1.5),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_survive_the_wire(event: GenerateEvent) -> None:
    wire = convert_inference.generate_event_to_pb(event).SerializeToString()
    assert convert_inference.generate_event_from_pb(inference_pb2.GenerateEvent.FromString(wire)) == event


@pytest.mark.parametrize("n", [1, 2, 128, 129])
def test_the_number_of_answers_survives_the_wire(n: int) -> None:
    request = GenerateRequest(TextPrompt("hello"), n=n)
    wire = convert_inference.generate_request_to_pb(request).SerializeToString()
    assert convert_inference.generate_request_from_pb(inference_pb2.GenerateRequest.FromString(wire)) == request


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cache_salt": "a\0b:/ü"},
        {"cache_salt": ""},  # refused by the coordinator, so it has to arrive as what it is
        {"public_cache": "docs"},
        {"cache_ttl_s": 0.0},
        {"cache_ttl_s": 300.5},
    ],
)
def test_what_a_request_says_of_caching_survives_the_wire(changes: dict[str, Any]) -> None:
    request = GenerateRequest(TextPrompt("hello"), **changes)
    wire = convert_inference.generate_request_to_pb(request).SerializeToString()
    assert convert_inference.generate_request_from_pb(inference_pb2.GenerateRequest.FromString(wire)) == request


def test_a_client_that_does_not_know_of_n_gets_one_answer() -> None:
    assert convert_inference.generate_request_from_pb(inference_pb2.GenerateRequest(text="hello")).n == 1


@pytest.mark.parametrize("n", [0, -1, 2**32])
def test_a_number_of_answers_that_the_wire_cannot_carry_is_refused_by_the_client(n: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"{n}"):
        convert_inference.generate_request_to_pb(GenerateRequest(TextPrompt("hello"), n=n))
