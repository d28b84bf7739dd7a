"""A request while it runs: the task that computes its answers, and who may end it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

from coordinator.choices import Choices
from coordinator.event_log import EventLog
from coordinator.explain import Life
from coordinator.lifetime import Edge
from coordinator.metrics import CoordinatorMetrics
from coordinator.outbox import Outbox
from coordinator.request import AcceptedRequest
from coordinator.tally import Tally
from kvrelay.errors import CancelledError, DeadlineError, KVRelayError
from kvrelay.explanation import Explanation
from kvrelay.inference import (
    ChoiceFinished,
    GenerateEvent,
    RequestAccepted,
    RequestFailed,
    RequestFinished,
    TokensGenerated,
)

logger = logging.getLogger(__name__)


class RunningRequest:
    """One producer, the task that runs the choices; one consumer, the client's call.

    However it ends, its last event is RequestFinished or RequestFailed.
    """

    task: asyncio.Task[None]

    def __init__(
        self, accepted: AcceptedRequest, metrics: CoordinatorMetrics, n: int = 1, log: EventLog | None = None
    ) -> None:
        """`accepted` is the first answer's. `log` takes the events where they may be read again."""
        self.accepted = accepted
        self._metrics = metrics
        self._n = n
        self._outbox = log or Outbox()
        self._outbox.put(_accepted_event(accepted))
        self._choices: Choices | None = None
        self._tally: Tally | None = None
        self._end: RequestFinished | RequestFailed | None = None
        self._verdict: KVRelayError | None = None  # why someone ended it from outside
        self._has_begun = False
        self._started_at = time.monotonic()
        self._last_token_at: dict[int, float] = {}  # by answer

    @property
    def num_open(self) -> int:
        """Answers that wait or are computed."""
        return self._choices.num_open if self._choices else 0

    def start(self, choices: Choices, tally: Tally, timeout_s: float) -> None:
        """Takes over choices that have entered the queue."""
        self._choices = choices
        self._tally = tally
        self.task = asyncio.create_task(self._run(choices, timeout_s), name=f"request {self.accepted.request_id}")

    def explain(self) -> Explanation:
        """What there is to tell of its life so far."""
        assert self._choices is not None
        life = Life(self._choices.flows, self.accepted.model.name, self._end, self._last_token_at.get(0))
        return life.explain(time.monotonic())

    def left(self) -> None:
        """Its only client reads no more."""
        self.cancel("the client went away")

    def cancel(self, why: str) -> None:
        self.fail(CancelledError(why))

    def fail(self, error: KVRelayError) -> None:
        """Ends it with `error`, unless it has ended or someone was faster."""
        if self._verdict is not None or self.task.done():
            return
        self._verdict = error
        if self._has_begun:
            self.task.cancel()  # before its first step a task would end without a trace; that step reads the verdict

    def emit(self, tokens: TokensGenerated) -> None:
        """Counts tokens of an answer on their way to the client."""
        if tokens.tokens:
            self._count(tokens.index, len(tokens.tokens), time.monotonic())
        self._outbox.put(tokens)

    def choice_finished(self, index: int, finished: RequestFinished) -> None:
        """An answer is complete; where it is the only one, the end of the request says so."""
        self._metrics.answered(finished.reason)
        if self._tally is not None:
            self._tally.answered(index)
        if self._n > 1:
            num_tokens = finished.usage.completion_tokens
            self._outbox.put(ChoiceFinished(index, finished.reason, finished.stop_string, num_tokens))

    def events(self) -> AsyncIterator[GenerateEvent]:
        """Every event, the terminal one last; those of one answer in order. May be read once."""
        return self._outbox.events()

    def _count(self, index: int, num_tokens: int, now: float) -> None:
        last_at = self._last_token_at.get(index)
        if last_at is None:
            self._note_first_of(index, now)
        self._metrics.tokens(num_tokens, None if last_at is None else now - last_at)
        self._last_token_at[index] = now
        if self._tally is not None:
            self._tally.tokens(index, num_tokens, now - self._started_at, now)

    def _note_first_of(self, index: int, now: float) -> None:
        if not self._last_token_at:
            self._metrics.first_token(now - self._started_at)
        if index == 0 and self._choices is not None:
            self._choices.note_first_token()

    async def _run(self, choices: Choices, timeout_s: float) -> None:
        try:
            self._end = await self._finish(choices, timeout_s)
            self._outbox.put(self._end)
        finally:
            choices.leave()

    async def _finish(self, choices: Choices, timeout_s: float) -> RequestFinished | RequestFailed:
        self._has_begun = True
        try:
            if self._verdict is not None:
                raise asyncio.CancelledError
            async with asyncio.timeout(timeout_s):
                finished = await choices.run()
            self._metrics.finished(finished)
            return finished
        except KVRelayError as error:
            return self._failed(choices, Edge.FAILED, error)
        except TimeoutError:
            return self._failed(choices, Edge.FAILED, DeadlineError(f"the request took longer than {timeout_s:g} s"))
        except asyncio.CancelledError:
            verdict = self._verdict or CancelledError("the request's task was cancelled")
            edge = Edge.CANCELLED if isinstance(verdict, CancelledError) else Edge.FAILED
            return self._failed(choices, edge, verdict)
        except Exception:
            logger.exception("%s failed", self.accepted.request_id)
            return self._failed(choices, Edge.FAILED, KVRelayError("the coordinator failed; its log says why"))

    def _failed(self, choices: Choices, edge: Edge, error: KVRelayError) -> RequestFailed:
        choices.end(edge, error.message)
        self._metrics.failed(error.code)
        if self._tally is not None and edge is not Edge.CANCELLED:
            self._tally.failed()
        return RequestFailed(error.code, error.message, error.retryable, error.retry_after_s)


def _accepted_event(accepted: AcceptedRequest) -> RequestAccepted:
    seed, max_tokens = accepted.sampling.seed, accepted.sampling.max_tokens
    assert seed is not None
    assert max_tokens is not None
    return RequestAccepted(accepted.request_id, len(accepted.prompt_ids), seed, max_tokens)
