"""Clients that ask without pause, and judge what they get."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from enum import Enum

from kvrelay.client import AnswerEvent
from kvrelay.errors import CancelledError, DeadlineError, KVRelayError
from kvrelay.inference import ChoiceFinished, RequestAccepted, RequestFinished, TokenPrompt, TokensGenerated
from tests.chaos.asks import Ask, Leave, asks
from tests.chaos.cluster import ChaosCluster
from tests.chaos.expected import Expected
from tests.chaos.judge import ReceivedChoice, judge_beginning, judge_whole
from tests.chaos.stalls import StallWatch

ANSWER_TIMEOUT_S = 90.0  # far more than any answer and any fault takes
CANCEL_TIMEOUT_S = 5.0


class Outcome(Enum):
    ANSWERED = "answered"
    LEFT = "left early"
    FAILED = "failed honestly"  # the client's own coordinator was down; it asks the other one
    STALLED = "machine stalled"  # failed honestly in or soon after a time in which this process was not run
    WRONG = "WRONG"


@dataclass(slots=True)
class Try:
    """One request, and what became of it; moments are of time.monotonic."""

    ask: Ask
    coordinator: int
    started_at: float
    choices: list[ReceivedChoice]
    request_id: str = ""
    accepted_at: float | None = None
    token_times: list[float] = field(default_factory=list)
    cancel_sent_at: float | None = None
    ended_at: float | None = None
    finished: RequestFinished | None = None
    error: KVRelayError | None = None
    outcome: Outcome | None = None
    problems: list[str] = field(default_factory=list)

    def take(self, event: AnswerEvent, now: float) -> None:
        match event:
            case RequestAccepted():
                self.accepted_at, self.request_id = now, event.request_id
            case TokensGenerated():
                self.choices[event.index].tokens += event.tokens
                self.choices[event.index].text += event.text
                if event.tokens:
                    self.token_times.append(now)
            case ChoiceFinished():
                choice = self.choices[event.index]
                choice.reason, choice.stop_string = event.reason, event.stop_string
            case RequestFinished():
                self.finished = event
                self.choices[0].reason, self.choices[0].stop_string = event.reason, event.stop_string

    def silences(self, now: float) -> list[tuple[float, float]]:
        """Start and end of each time without a token, while there were some to come."""
        last = self.ended_at or now
        times = self.token_times if self.finished else [*self.token_times, last]
        return list(itertools.pairwise([self.started_at, *times]))


Excuses = Callable[[int, float, bool], bool]


class Load:
    """`num_workers` clients; each asks one request at a time, until `stop`. `excuses(coordinator, ended_at,
    accepted)` tells whether a failure was the coordinator's death."""

    def __init__(
        self,
        cluster: ChaosCluster,
        expected: Sequence[Expected],
        seed: int,
        num_workers: int,
        excuses: Excuses,
        stalls: StallWatch,
    ) -> None:
        self._cluster = cluster
        self._expected = expected
        self._seed = seed
        self._num_workers = num_workers
        self._excuses = excuses
        self._stalls = stalls
        self._stopping = asyncio.Event()
        self.tries: list[Try] = []

    def stop(self) -> None:
        """No new requests; those under way go on."""
        self._stopping.set()

    @property
    def num_open(self) -> int:
        return sum(one.outcome is None for one in self.tries)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as workers:
            for number in range(self._num_workers):
                workers.create_task(self._work(number), name=f"worker {number}")

    async def _work(self, worker: int) -> None:
        num_coordinators = len(self._cluster.coordinators)
        for ask in asks(self._seed, worker, len(self._expected), num_coordinators):
            with suppress(TimeoutError):
                async with asyncio.timeout(ask.pause_s):
                    await self._stopping.wait()
            if self._stopping.is_set():
                return
            one = await self._try(ask, ask.coordinator)
            if one.outcome is Outcome.FAILED and num_coordinators > 1:
                await self._try(ask, (ask.coordinator + 1) % num_coordinators)

    async def _try(self, ask: Ask, coordinator: int) -> Try:
        expected = self._expected[ask.shape]
        one = Try(ask, coordinator, time.monotonic(), [ReceivedChoice() for _ in expected.choices])
        self.tries.append(one)
        leaving = asyncio.create_task(self._leave(one)) if ask.leave is Leave.CANCEL else None
        try:
            async with asyncio.timeout(ask.leave_after_s if ask.leave is Leave.DROP else None):
                await self._read(one, expected)
        except TimeoutError:
            one.outcome = Outcome.LEFT
        except KVRelayError as error:
            one.error = error
        finally:
            one.ended_at = time.monotonic()
            if leaving is not None:
                leaving.cancel()
        self._judge(one, expected)
        return one

    async def _read(self, one: Try, expected: Expected) -> None:
        client = self._cluster.client(self._cluster.coordinators[one.coordinator])
        prompt = TokenPrompt(expected.shape.prompt_ids)
        request_id = one.ask.name if one.ask.leave is Leave.CANCEL else ""
        events = client.generate(
            prompt, expected.sampling, request_id=request_id, n=expected.shape.n, timeout_s=ANSWER_TIMEOUT_S
        )
        async with aclosing(events):
            async for event in events:
                one.take(event, time.monotonic())

    async def _leave(self, one: Try) -> None:
        await asyncio.sleep(one.ask.leave_after_s)
        client = self._cluster.client(self._cluster.coordinators[one.coordinator])
        one.cancel_sent_at = time.monotonic()
        with suppress(KVRelayError, TimeoutError):  # it may be over, not there yet, or the coordinator down
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                await client.cancel(one.ask.name)

    def _judge(self, one: Try, expected: Expected) -> None:
        assert one.ended_at is not None
        if one.finished is not None:
            one.problems = judge_whole(expected, one.choices, one.finished)
            one.outcome = Outcome.ANSWERED
        else:
            one.problems = judge_beginning(expected, one.choices)
        if one.error is not None:
            one.outcome = outcome_of(one, one.error, one.ended_at, self._excuses, self._stalls)
        if one.outcome is Outcome.WRONG and one.error is not None:
            one.problems.append(f"it failed: {type(one.error).__name__}: {one.error.message}")
        if one.problems:
            one.outcome = Outcome.WRONG


def outcome_of(one: Try, error: KVRelayError, ended_at: float, excuses: Excuses, stalls: StallWatch) -> Outcome:
    """Of a request that failed. A coordinator that is down breaks its streams within seconds, and so whoever waited
    until its own deadline was forgotten by somebody, whatever has happened meanwhile."""
    if isinstance(error, CancelledError) and one.cancel_sent_at is not None:
        return Outcome.LEFT
    if isinstance(error, DeadlineError) or not error.retryable:
        return Outcome.WRONG
    if excuses(one.coordinator, ended_at, one.accepted_at is not None):
        return Outcome.FAILED
    return Outcome.STALLED if stalls.touches(ended_at, ended_at) else Outcome.WRONG
