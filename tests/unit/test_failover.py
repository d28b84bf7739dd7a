"""An answer that broke off, and coordinators that will not go on with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvrelay.errors import BudgetSpentError, KVRelayError, TargetOutOfReachError, UnavailableError
from kvrelay.failover import FailoverAnswer
from kvrelay.inference import GenerateEvent, GenerateRequest, RequestAccepted, TextPrompt
from kvrelay.types import RequestId

ACCEPTED = RequestAccepted(RequestId("mine"), 1, 7, 100)
BROKEN = UnavailableError("it went away")


class Coordinator:
    """Fails each time; the first time, if it `begins`, after the request was accepted."""

    def __init__(self, error: KVRelayError, *, begins: bool = False) -> None:
        self.num_asked = 0
        self._error = error
        self._begins = begins

    @asynccontextmanager
    async def generate(
        self, request: GenerateRequest, timeout_s: float | None
    ) -> AsyncIterator[AsyncIterator[GenerateEvent]]:
        self.num_asked += 1
        yield self._events()

    async def _events(self) -> AsyncIterator[GenerateEvent]:
        if self._begins and self.num_asked == 1:
            yield ACCEPTED
        raise self._error


async def error_of(*coordinators: Coordinator) -> KVRelayError:
    request = GenerateRequest(TextPrompt("hello"), request_id="mine")
    answer = FailoverAnswer(coordinators, 0, request, None, lambda index: None)  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(30):
            async for _ in answer.events():
                pass
    except KVRelayError as error:
        return error
    raise AssertionError("the answer is whole")


async def test_who_is_told_to_come_back_tomorrow_is_told_what_broke_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.failover.NUM_ROUNDS", 2)
    gone, spent = Coordinator(BROKEN, begins=True), Coordinator(BudgetSpentError("all used", retry_after_s=50_000))
    assert await error_of(gone, spent) is BROKEN
    assert (gone.num_asked, spent.num_asked) == (2, 1)


async def test_what_is_refused_for_good_is_not_asked_for_again() -> None:
    refusal = TargetOutOfReachError("too slow by itself")
    gone, slow = Coordinator(BROKEN, begins=True), Coordinator(refusal)
    assert await error_of(gone, slow) is refusal
    assert (gone.num_asked, slow.num_asked) == (1, 1)
