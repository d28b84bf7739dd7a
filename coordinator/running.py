"""A request while it runs: the task that computes it and the events that wait for its client."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator

from coordinator.flow import Flow
from coordinator.lifetime import Edge
from coordinator.metrics import CoordinatorMetrics
from coordinator.request import AcceptedRequest
from kvrelay.errors import CancelledError, DeadlineError, KVRelayError
from kvrelay.inference import GenerateEvent, RequestAccepted, RequestFailed, TokensGenerated

logger = logging.getLogger(__name__)


class RunningRequest:
    """One producer, the flow's task; one consumer, the client's call. A slow client gets its tokens in larger events.

    However the flow ends, its last event is RequestFinished or RequestFailed.
    """

    task: asyncio.Task[None]

    def __init__(self, accepted: AcceptedRequest, metrics: CoordinatorMetrics) -> None:
        self.accepted = accepted
        self._metrics = metrics
        self._events: deque[GenerateEvent] = deque([_accepted_event(accepted)])
        self._arrived = asyncio.Event()
        self._arrived.set()
        self._verdict: KVRelayError | None = None  # why someone ended it from outside
        self._has_begun = False
        self._started_at = time.monotonic()
        self._last_token_at: float | None = None

    def start(self, flow: Flow, timeout_s: float) -> None:
        self.task = asyncio.create_task(self._run(flow, timeout_s), name=f"request {self.accepted.request_id}")

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
        """Counts tokens on their way to the client."""
        now = time.monotonic()
        if tokens.tokens:
            if self._last_token_at is None:
                self._metrics.first_token(now - self._started_at)
            gap_s = None if self._last_token_at is None else now - self._last_token_at
            self._metrics.tokens(len(tokens.tokens), gap_s)
            self._last_token_at = now
        self._put(tokens)

    async def events(self) -> AsyncIterator[GenerateEvent]:
        """Every event in order, the terminal one last; may be read once."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._events:
                event = self._take()
                yield event
                if not isinstance(event, RequestAccepted | TokensGenerated):
                    return

    async def _run(self, flow: Flow, timeout_s: float) -> None:
        try:
            self._put(await self._finish(flow, timeout_s))
        finally:
            flow.leave()

    async def _finish(self, flow: Flow, timeout_s: float) -> GenerateEvent:
        self._has_begun = True
        try:
            if self._verdict is not None:
                raise asyncio.CancelledError
            async with asyncio.timeout(timeout_s):
                finished = await flow.run()
            self._metrics.finished(finished)
            return finished
        except KVRelayError as error:
            return self._failed(flow, Edge.FAILED, error)
        except TimeoutError:
            return self._failed(flow, Edge.FAILED, DeadlineError(f"the request took longer than {timeout_s:g} s"))
        except asyncio.CancelledError:
            verdict = self._verdict or CancelledError("the request's task was cancelled")
            edge = Edge.CANCELLED if isinstance(verdict, CancelledError) else Edge.FAILED
            return self._failed(flow, edge, verdict)
        except Exception:
            logger.exception("%s failed", self.accepted.request_id)
            return self._failed(flow, Edge.FAILED, KVRelayError("the coordinator failed; its log says why"))

    def _failed(self, flow: Flow, edge: Edge, error: KVRelayError) -> RequestFailed:
        flow.lifetime.take(edge)
        self._metrics.failed(error.code)
        return RequestFailed(error.code, error.message, error.retryable, error.retry_after_s)

    def _put(self, event: GenerateEvent) -> None:
        self._events.append(event)
        self._arrived.set()

    def _take(self) -> GenerateEvent:
        event = self._events.popleft()
        if not isinstance(event, TokensGenerated):
            return event
        tokens, texts = list(event.tokens), [event.text]
        while self._events and isinstance(self._events[0], TokensGenerated):
            more = self._events.popleft()
            assert isinstance(more, TokensGenerated)
            tokens += more.tokens
            texts.append(more.text)
        return TokensGenerated(tuple(tokens), "".join(texts))


def _accepted_event(accepted: AcceptedRequest) -> RequestAccepted:
    seed, max_tokens = accepted.sampling.seed, accepted.sampling.max_tokens
    assert seed is not None
    assert max_tokens is not None
    return RequestAccepted(accepted.request_id, len(accepted.prompt_ids), seed, max_tokens)
