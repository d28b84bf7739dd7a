"""How long answers are kept, for whom, and how many, in virtual time."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from coordinator.event_log import EventLog
from coordinator.kept import FIXED_BYTES, KeptAnswers, Reader
from coordinator.request_digest import request_digest
from kvrelay.errors import DuplicateRequestError, InvalidRequestError, OverloadedError
from kvrelay.inference import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
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
from kvrelay.types import FinishReason, RequestId
from tests.support.virtual_timers import VirtualTimers

FINISHED = RequestFinished(FinishReason.STOP, Usage(3, 1), Timing())
REQUEST = GenerateRequest(TextPrompt("hello"), request_id="mine", keep_s=10.0)
SETTLED = SamplingParams(seed=7, max_tokens=100)
AT_MOST = FIXED_BYTES + 100 * (4 + 12)  # bytes of a request's answer of 100 tokens, while it runs


@dataclass
class Keeping:
    max_bytes: int = 10 * AT_MOST
    timers: VirtualTimers = field(default_factory=VirtualTimers)
    cancelled: list[str] = field(default_factory=list)
    num_attached: int = 0

    def __post_init__(self) -> None:
        self.answers = KeptAnswers(self.max_bytes, self.timers.later, self._attached)
        self.logs: dict[str, EventLog] = {}

    def _attached(self) -> None:
        self.num_attached += 1

    def begin(self, request: GenerateRequest = REQUEST, tenant: str = "a", settled: SamplingParams = SETTLED) -> Reader:
        log = self.logs[request.request_id] = self.answers.make_log(request, settled)
        return self.answers.add(request, settled, tenant, log, self.cancelled.append)

    def end(self, request_id: str = "mine", event: RequestFinished | RequestFailed = FINISHED) -> None:
        self.logs[request_id].put(event)
        self.answers.ended(RequestId(request_id))

    def knows(self, request_id: str = "mine", tenant: str = "a") -> bool:
        reader = self.answers.attach(replace(REQUEST, request_id=request_id), tenant)
        if reader is not None:
            reader.left()
        return reader is not None


async def test_a_request_goes_on_for_its_time_after_its_call_and_is_ended_then() -> None:
    keeping = Keeping()
    reader = keeping.begin()
    keeping.timers.pass_time(1_000.0)  # while someone reads there is no end
    reader.left()
    reader.left()  # once is enough
    keeping.timers.pass_time(9.9)
    assert keeping.cancelled == []
    keeping.timers.pass_time(0.2)
    assert keeping.cancelled == ["nobody came back for the answer within 10 s"]
    assert keeping.answers.attach(REQUEST, "a") is None
    assert keeping.answers.num_bytes == 0


async def test_who_comes_back_in_time_stops_the_clock_and_the_last_to_leave_starts_it() -> None:
    keeping = Keeping()
    keeping.begin().left()
    keeping.timers.pass_time(9.0)
    second, third = keeping.answers.attach(REQUEST, "a"), keeping.answers.attach(REQUEST, "a")
    assert second is not None
    assert third is not None
    assert keeping.num_attached == 2
    keeping.timers.pass_time(100.0)
    second.left()
    keeping.timers.pass_time(100.0)
    assert keeping.cancelled == []
    third.left()
    keeping.timers.pass_time(10.1)
    assert len(keeping.cancelled) == 1


async def test_an_answer_is_kept_for_its_time_after_its_end_however_often_it_is_read() -> None:
    keeping = Keeping()
    reader = keeping.begin()
    keeping.end()
    reader.left()
    keeping.timers.pass_time(9.0)
    assert keeping.knows()
    keeping.timers.pass_time(0.9)
    assert keeping.knows()
    keeping.timers.pass_time(0.2)
    assert not keeping.knows()
    assert keeping.answers.num_bytes == 0
    assert keeping.timers.num_pending == 0


async def test_whoever_reads_it_when_its_time_is_over_reads_on() -> None:
    keeping = Keeping()
    reader = keeping.begin()
    keeping.end()
    keeping.timers.pass_time(20.0)
    assert not keeping.knows()
    assert keeping.answers.num_bytes == FIXED_BYTES
    assert [event async for event in reader.events()] == [FINISHED]
    reader.left()
    assert keeping.answers.num_bytes == 0


@pytest.mark.parametrize(
    ("changes", "tenant"),
    [
        ({"prompt": TextPrompt("hell")}, "a"),
        ({"prompt": TokenPrompt((1,))}, "a"),
        ({"sampling": SamplingParams(seed=8)}, "a"),
        ({"sampling": SamplingParams(seed=7)}, "a"),  # neither as sent nor as settled
        ({"sampling": SamplingParams(temperature=0.5)}, "a"),
        ({"n": 2}, "a"),
        ({"cache_salt": "s"}, "a"),
        ({"keep_s": 0.0}, "a"),
        ({}, "b"),
    ],
)
async def test_what_is_not_the_same_request_is_told_no_more_than_that(changes: dict[str, Any], tenant: str) -> None:
    keeping = Keeping()
    keeping.begin()
    said = (
        "the id 'mine' is that of a request that runs or whose answer is kept, and this is not the same one sent again "
        "with keep_s; choose another id"
    )
    for _ in ("it runs", "it is kept"):
        with pytest.raises(DuplicateRequestError, match=f"^{re.escape(said)}$"):
            keeping.answers.attach(replace(REQUEST, **changes), tenant)
        keeping.end()
    assert keeping.num_attached == 0


async def test_the_same_request_with_what_was_settled_for_it_is_the_same() -> None:
    keeping = Keeping()
    keeping.begin()
    assert keeping.answers.attach(replace(REQUEST, sampling=SETTLED), "a") is not None
    assert keeping.answers.attach(replace(REQUEST, keep_s=3.0), "a") is not None


def test_a_digest_is_of_the_content_and_of_nothing_else() -> None:
    biased = replace(REQUEST, sampling=SamplingParams(logit_bias={1: 0.5, 2: 1.0}))
    turned = replace(REQUEST, sampling=SamplingParams(logit_bias={2: 1.0, 1: 0.5}), request_id="", keep_s=1.0)
    assert request_digest(biased, "a") == request_digest(turned, "a")
    prompts = (
        TextPrompt("1"),
        TokenPrompt((1,)),
        TokenPrompt((1, 2)),
        TokenPrompt(()),
        ChatPrompt((ChatMessage("user", "1"),)),
        ChatPrompt((ChatMessage("system", "1"),)),
        None,
    )
    assert len({request_digest(GenerateRequest(prompt), "a") for prompt in prompts}) == len(prompts)


def test_a_digest_is_of_what_the_answer_is_held_to() -> None:
    structures = (
        None,
        StructuredOutput(StructureKind.JSON_OBJECT),
        StructuredOutput(StructureKind.REGEX, "a"),
        StructuredOutput(StructureKind.GRAMMAR, "a"),
        StructuredOutput(StructureKind.CHOICE, choices=("a", "b")),
        StructuredOutput(StructureKind.CHOICE, choices=("a, b",)),
    )
    requests = [replace(REQUEST, sampling=SamplingParams(structured=structured)) for structured in structures]
    assert len({request_digest(request, "a") for request in requests}) == len(structures)


async def test_a_failure_that_may_be_tried_again_is_not_kept_and_another_one_is() -> None:
    keeping = Keeping()
    keeping.begin().left()
    keeping.end(event=RequestFailed("unavailable", "gone", retryable=True))
    assert not keeping.knows()
    keeping.begin().left()
    keeping.end(event=RequestFailed("cancelled", "the request was cancelled", retryable=False))
    assert keeping.knows()


async def test_only_its_tenant_can_have_an_ended_answer_forgotten() -> None:
    keeping = Keeping()
    keeping.begin().left()
    assert not keeping.answers.forget(RequestId("mine"), "a")  # it runs
    keeping.end()
    assert not keeping.answers.forget(RequestId("mine"), "b")
    assert keeping.answers.forget(RequestId("mine"), "a")
    assert not keeping.knows()
    assert keeping.answers.num_bytes == 0


async def test_what_runs_counts_with_what_it_may_become_and_what_ended_with_what_it_is() -> None:
    keeping = Keeping()
    keeping.begin().left()
    assert keeping.answers.num_bytes == AT_MOST
    keeping.logs["mine"].put(TokensGenerated((GeneratedToken(5),), "hello"))
    keeping.end()
    assert keeping.answers.num_bytes == FIXED_BYTES + 4 + 5


async def test_the_oldest_complete_answers_that_nobody_reads_make_room() -> None:
    keeping = Keeping(max_bytes=AT_MOST + 2 * FIXED_BYTES)
    readers = {}
    for name in ("first", "second"):
        readers[name] = keeping.begin(replace(REQUEST, request_id=name))
        keeping.end(name)
    readers["second"].left()
    keeping.begin(replace(REQUEST, request_id="third"))  # all three just fit
    assert [keeping.knows(name) for name in ("first", "second", "third")] == [True, True, True]
    keeping.end("third")
    keeping.begin(replace(REQUEST, request_id="fourth"))
    assert [keeping.knows(name) for name in ("first", "second", "third", "fourth")] == [True, False, True, True]
    assert keeping.answers.num_bytes == AT_MOST + 2 * FIXED_BYTES


async def test_what_runs_is_never_given_up_for_a_new_one() -> None:
    keeping = Keeping(max_bytes=2 * AT_MOST - 1)
    keeping.begin()
    with pytest.raises(OverloadedError, match=rf"take all of the {2 * AT_MOST - 1} bytes") as caught:
        keeping.begin(replace(REQUEST, request_id="other"))
    assert caught.value.retry_after_s == 1.0
    assert keeping.knows()
    keeping.end()
    keeping.begin(replace(REQUEST, request_id="other"))


@pytest.mark.parametrize("max_bytes", [0, AT_MOST - 1])
async def test_what_could_never_be_kept_is_told_so(max_bytes: int) -> None:
    keeping = Keeping(max_bytes=max_bytes)
    with pytest.raises(
        InvalidRequestError,
        match=rf"may take {AT_MOST} bytes and this coordinator keeps {max_bytes} \(--max-kept-bytes\)",
    ):
        keeping.begin()


async def test_a_thousand_answers_stay_within_the_bound() -> None:
    keeping = Keeping(max_bytes=4 * AT_MOST)
    for number in range(1_000):
        name = f"request {number}"
        keeping.begin(replace(REQUEST, request_id=name)).left()
        keeping.logs[name].put(TokensGenerated((GeneratedToken(5),) * 100, "x" * 400))
        keeping.end(name)
        assert keeping.answers.num_bytes <= 4 * AT_MOST
    assert keeping.knows("request 999")
    assert not keeping.knows("request 0")
    keeping.answers.close()
    assert (len(keeping.answers), keeping.answers.num_bytes, keeping.timers.num_pending) == (0, 0, 0)
