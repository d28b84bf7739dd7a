"""One answer, from whichever of several coordinators is there to give it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from kvrelay.delivered import AnswerEvent, Delivered
from kvrelay.errors import DuplicateRequestError, KVRelayError, OverloadedError, UnavailableError
from kvrelay.inference import GenerateRequest, RequestAccepted, RequestFailed, RequestFinished
from kvrelay.rounds import Rounds
from kvrelay.rpc.convert_inference import error_of
from kvrelay.rpc.coordinator import CoordinatorClient

NUM_ROUNDS = 5  # over all coordinators, about 1.5 s when none says when to come back
MAX_PAUSE_S = 30.0  # for the rest of an answer; some are told to come back tomorrow
CANCEL_TIMEOUT_S = 2.0


class FailoverAnswer:
    """Reads one request's answer. What the caller has seen is not given again, and what follows is of the same seed.

    With one coordinator and without keep_s there is one attempt: nobody else could go on.
    """

    def __init__(
        self,
        coordinators: Sequence[CoordinatorClient],
        first: int,
        request: GenerateRequest,
        timeout_s: float | None,
        on_working: Callable[[int], None],
    ) -> None:
        """`first` is asked first; `on_working` hears which one answers."""
        self._coordinators = coordinators
        self._request = request
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        self._on_working = on_working
        may_repeat = len(coordinators) > 1 or request.keep_s > 0
        self._rounds = Rounds(len(coordinators), first, NUM_ROUNDS if may_repeat else 1)
        self._delivered = Delivered()
        self._num_asked: Counter[int] = Counter()
        self._broken_by: KVRelayError | None = None  # what interrupted the answer; cleared when it goes on
        self._was_told = False  # of a failure by the coordinator, which then has no such request any more

    async def events(self) -> AsyncGenerator[AnswerEvent, None]:
        """RequestFinished is the last one. Raises KVRelayError. Left early, it ends the request also where that would
        outlive its call."""
        if self._timeout_s is not None:
            self._deadline = time.monotonic() + self._timeout_s
        try:
            while True:
                try:
                    async with contextlib.aclosing(self._attempt()) as events:
                        async for event in events:
                            yield event
                    return
                except KVRelayError as error:
                    pause_s = self._pause_before_next(error)
                await asyncio.sleep(pause_s)
                self._begin_again()
        except (GeneratorExit, asyncio.CancelledError):
            await self._cancel()
            raise

    async def _attempt(self) -> AsyncGenerator[AnswerEvent, None]:
        asked, self._was_told = self._rounds.current, False
        async with self._coordinators[asked].generate(self._request, self._left_s()) as events:
            self._num_asked[asked] += 1
            async for event in events:
                if isinstance(event, RequestFailed):
                    self._was_told = True
                    raise error_of(event)
                if isinstance(event, RequestAccepted):
                    self._on_working(asked)
                fresh = self._delivered.take(event)
                if fresh is not None:
                    self._broken_by = None
                    self._rounds.advanced()
                    yield fresh
                if isinstance(event, RequestFinished):
                    return
        raise UnavailableError("the coordinator ended the stream before the answer was complete")

    def _pause_before_next(self, error: KVRelayError) -> float:
        """Raises `error`, or what first interrupted the answer, when there is to be no other attempt."""
        begun = self._delivered.accepted is not None
        is_kept = begun and self._broken_by is None and self._request.keep_s > 0 and not self._was_told
        if begun and self._broken_by is None:
            self._broken_by = error
        if not self._may_help(error, begun):
            raise error
        # Where it is kept it is not computed anew.
        pause_s = self._rounds.next(error.retry_after_s, time.monotonic(), stay=is_kept)
        left_s = self._left_s()
        if pause_s is None or pause_s > MAX_PAUSE_S or (left_s is not None and pause_s >= left_s):
            raise self._broken_by or error
        return pause_s

    def _may_help(self, error: KVRelayError, begun: bool) -> bool:
        if isinstance(error, UnavailableError):
            return True
        if isinstance(error, OverloadedError):  # to be told, unless half an answer is there
            return begun and error.retryable
        if isinstance(error, DuplicateRequestError):  # by our own earlier attempt, which is not given up there yet
            return not self._request.keep_s and self._num_asked[self._rounds.current] > 1
        return False

    def _begin_again(self) -> None:
        accepted = self._delivered.accepted
        if accepted is None:
            return
        self._delivered.begin_again()
        settled = replace(self._request.sampling, seed=accepted.seed, max_tokens=accepted.max_tokens)
        self._request = replace(self._request, request_id=accepted.request_id, sampling=settled)

    async def _cancel(self) -> None:
        if not self._request.keep_s:
            return  # the request ends with its call
        request_id, asked = self._request.request_id, (self._coordinators[index] for index in self._num_asked)
        cancels = (coordinator.cancel(request_id, CANCEL_TIMEOUT_S) for coordinator in asked)
        await asyncio.gather(*cancels, return_exceptions=True)  # one that is gone, or has it not, is as good

    def _left_s(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)
