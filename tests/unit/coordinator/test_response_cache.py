"""Which requests get an earlier answer, and for how long."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from coordinator.event_log import EventLog
from coordinator.response_cache import CachedAnswer, ResponseCache
from coordinator.tenants import Tenant
from kvrelay.inference import (
    ChatMessage,
    ChatPrompt,
    GenerateEvent,
    GenerateRequest,
    RequestAccepted,
    RequestFailed,
    RequestFinished,
    TextPrompt,
    Timing,
    TokenPrompt,
    TokensGenerated,
    Usage,
)
from kvrelay.sampling import GeneratedToken, SamplingParams
from kvrelay.structured import StructuredOutput, StructureKind
from kvrelay.types import CachedTokens, FinishReason, RequestId
from tests.support.fake_nodes import MODEL
from tests.support.manual_clock import ManualClock

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
REQUEST = GenerateRequest(TextPrompt("hello"), GREEDY, model="bytes")
ACME = Tenant("acme")
ONE_BYTES = 2_048 + 4 + 2  # of log_of(): a token and two characters

# Of every field another value; what is not here has no test, which the first test says.
OTHER_REQUESTS: dict[str, Any] = {
    "prompt": TextPrompt("hello!"),
    "sampling": replace(GREEDY, max_tokens=9),
    "model": "other",
    "n": 2,
    "cache_salt": "x",
    "public_cache": "x",
}
OTHER_SAMPLING: dict[str, Any] = {
    "max_tokens": 9,
    "min_tokens": 1,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.1,
    "seed": 1,
    "stop": ("x",),
    "stop_token_ids": (1,),
    "ignore_eos": True,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {1: 1.0},
    "logprobs": 0,
    "structured": StructuredOutput(StructureKind.REGEX, "a"),
}
SAME_ANSWER: dict[str, Any] = {
    "request_id": "another",
    "priority": 5,
    "ttft_target_s": 1.0,
    "itl_target_s": 1.0,
    "best_effort": True,
    "cache_ttl_s": 5.0,
}
NEVER_CACHED = {"keep_s": 1.0}


def cache(max_bytes: int = 10_000, clock: ManualClock | None = None) -> ResponseCache:
    return ResponseCache(max_bytes, 60.0, clock or ManualClock())


def key(request: GenerateRequest = REQUEST, tenant: Tenant = ACME) -> bytes | None:
    return cache().key(request, tenant, MODEL)


def log_of(*events: GenerateEvent) -> EventLog:
    log = EventLog()
    for event in events or (*BEGINNING, FINISHED):
        log.put(event)
    return log


BEGINNING = (
    RequestAccepted(RequestId("first"), 5, 7, 8),
    TokensGenerated((GeneratedToken(65),), "ab"),
)
FINISHED = RequestFinished(
    FinishReason.LENGTH,
    Usage(5, 1, CachedTokens(device=2)),
    Timing(1.0, 2.0, 3.0, 4.0, 5.0),
    prefill_node="p:1",
    decode_node="d:1",
    handoff_bytes=9,
    retries=1,
    prefix_hash=b"p" * 32,
)


def test_every_field_is_tried_below() -> None:
    fields = {field.name for field in dataclasses.fields(GenerateRequest)}
    assert fields == {*OTHER_REQUESTS, *SAME_ANSWER, *NEVER_CACHED}
    assert {field.name for field in dataclasses.fields(SamplingParams)} == {*OTHER_SAMPLING, "temperature"}


@pytest.mark.parametrize("name", OTHER_REQUESTS)
def test_a_request_with_another_field_is_another(name: str) -> None:
    assert key(replace(REQUEST, **{name: OTHER_REQUESTS[name]})) != key()


@pytest.mark.parametrize("name", OTHER_SAMPLING)
def test_so_is_one_that_draws_otherwise(name: str) -> None:
    sampling = replace(GREEDY, **{name: OTHER_SAMPLING[name]})
    assert sampling != GREEDY
    assert key(replace(REQUEST, sampling=sampling)) != key()


@pytest.mark.parametrize("name", SAME_ANSWER)
def test_when_a_request_runs_changes_no_answer(name: str) -> None:
    assert key(replace(REQUEST, **{name: SAME_ANSWER[name]})) == key()


def test_prompts_of_different_kinds_are_different() -> None:
    chat = ChatPrompt((ChatMessage("user", "hello"),))
    prompts = [
        *(TextPrompt("hello"), TextPrompt("hello", add_bos=False), TokenPrompt((1, 2)), TokenPrompt((1, 3)), chat),
        ChatPrompt((ChatMessage("system", "be brief"), *chat.messages)),
        ChatPrompt((ChatMessage("user", "hi"), ChatMessage("assistant", "hello"), *chat.messages)),
        replace(chat, tools="[]"),
    ]
    assert len({key(replace(REQUEST, prompt=prompt)) for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize(
    "request_",
    [
        replace(REQUEST, sampling=replace(GREEDY, temperature=1.0)),
        replace(REQUEST, sampling=replace(GREEDY, temperature=1e-6)),
        replace(REQUEST, sampling=SamplingParams(seed=1)),
        replace(REQUEST, keep_s=1.0, request_id="mine"),
    ],
    ids=["temperature 1", "nearly 0", "unset", "kept"],
)
def test_what_is_drawn_or_kept_is_never_cached(request_: GenerateRequest) -> None:
    assert key(request_) is None


def test_without_room_nothing_is() -> None:
    assert cache(0).key(REQUEST, ACME, MODEL) is None


def test_another_tenant_or_model_has_other_answers() -> None:
    models = [MODEL, replace(MODEL, fingerprint="f2" * 32), replace(MODEL, dtype="bfloat16")]
    keys = {cache().key(REQUEST, tenant, model) for tenant in (ACME, Tenant("umbrella"), Tenant()) for model in models}
    assert len(keys) == 9


async def read(log: EventLog) -> list[GenerateEvent]:
    return [event async for event in CachedAnswer(RequestId("second"), log, lambda: 3.0).events()]


async def test_the_answer_is_the_first_one_under_a_new_id_with_what_it_cost_this_time() -> None:
    responses = cache()
    responses.add(b"k", log_of())
    found = responses.find(b"k")
    assert found is not None
    for _ in range(2):
        accepted, tokens, finished = await read(found)
        assert accepted == RequestAccepted(RequestId("second"), 5, 7, 8)
        assert tokens == BEGINNING[1]
        assert finished == RequestFinished(
            FinishReason.LENGTH,
            Usage(5, 1, CachedTokens(device=2)),
            Timing(),
            prefix_hash=b"p" * 32,
            from_response_cache=True,
        )


def test_an_answer_that_failed_or_has_not_ended_is_not_kept() -> None:
    responses = cache()
    responses.add(b"k", log_of(*BEGINNING, RequestFailed("unavailable", "draining", True)))
    responses.add(b"k", log_of(*BEGINNING))
    assert responses.find(b"k") is None
    assert responses.num_bytes == 0


def test_an_answer_ends_its_time_after_it_was_computed_however_often_it_is_given() -> None:
    clock = ManualClock()
    responses = cache(clock=clock)
    responses.add(b"k", log_of())
    clock.now += 59.0
    assert responses.find(b"k") is not None
    clock.now += 1.0
    assert responses.find(b"k") is None
    assert responses.num_bytes == 0


def test_the_least_recently_used_goes_first() -> None:
    responses = cache(2 * ONE_BYTES)
    for name in (b"a", b"b"):
        responses.add(name, log_of())
    responses.find(b"a")
    responses.add(b"c", log_of())
    assert [responses.find(name) is not None for name in (b"a", b"b", b"c")] == [True, False, True]
    assert responses.num_bytes == 2 * ONE_BYTES


def test_one_that_is_larger_than_all_the_room_drives_nothing_out() -> None:
    responses = cache(ONE_BYTES)
    responses.add(b"a", log_of())
    responses.add(b"b", log_of(*BEGINNING, TokensGenerated((GeneratedToken(66),), "c"), FINISHED))
    assert responses.find(b"a") is not None
    assert responses.find(b"b") is None
