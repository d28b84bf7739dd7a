"""Clients of a cluster in kvrelay's own types: `AsyncClient` for asyncio, `Client` for everything else.

Failures are the errors of kvrelay.errors. A stream that is left early is cancelled, which frees everything that the
request holds in the cluster.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from kvrelay.cluster import ClusterStatus, ListedModel, ModelInfo
from kvrelay.delivered import AnswerEvent as AnswerEvent
from kvrelay.errors import InvalidRequestError, NotFoundError, UnavailableError
from kvrelay.explanation import Explanation
from kvrelay.failover import FailoverAnswer
from kvrelay.inference import GenerateRequest, Prompt
from kvrelay.rounds import Rounds
from kvrelay.rpc.coordinator import CoordinatorClient
from kvrelay.rpc.credentials import ClientTLS
from kvrelay.sampling import SamplingParams

T = TypeVar("T")

CONTROL_TIMEOUT_S = 10.0
CONTROL_ROUNDS = 2
_STATES = ("finished", "running", "waiting", "failed", "cancelled")


def addresses_of(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """Of "host:port", "host:port,host:port" or a sequence of the first. Raises InvalidRequestError for none."""
    listed = addresses.split(",") if isinstance(addresses, str) else addresses
    found = tuple(dict.fromkeys(one.strip() for one in listed if one.strip()))
    if not found:
        raise InvalidRequestError(f"{addresses!r} names no coordinator; give host:port, or several with commas between")
    return found


class AsyncClient:
    """Speaks to the coordinator at `address` (host:port), or to any of several, given as one text with commas between
    or as a sequence. Belongs to one event loop.

    Of several the one that answered last is asked first. One that cannot be reached, or says that it is not available,
    is passed over for the next, within the caller's time; an answer that breaks off goes on from another one. With one
    address nothing is tried again, but what is kept (`keep_s`).

    `api_key` is an API key or a token, sent with every call. `ca` is a PEM file of the CA that signed the coordinators'
    certificates, and with it calls go over TLS. Where they are None, the environment's KVRELAY_API_KEY and KVRELAY_CA
    are taken; "" is neither. Raises ConfigError for a file that cannot be read.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        api_key: str | None = None,
        ca: str | Path | None = None,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        api_key = os.environ.get("KVRELAY_API_KEY", "") if api_key is None else api_key
        ca = os.environ.get("KVRELAY_CA", "") if ca is None else ca
        tls = ClientTLS.read(Path(ca).expanduser()) if ca else None
        self._coordinators = [CoordinatorClient(one, api_key, tls) for one in addresses_of(address)]
        self._first = 0
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        for coordinator in self._coordinators:
            await coordinator.close()

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str = "",
        model: str = "",
        n: int = 1,
        cache_salt: str | None = None,
        public_cache: str = "",
        cache_ttl_s: float | None = None,
        priority: int | None = None,
        ttft_target_s: float | None = None,
        itl_target_s: float | None = None,
        best_effort: bool = False,
        keep_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[AnswerEvent, None]:
        """The answer as it grows; RequestFinished is the last event.

        Of `n` answers the events come mixed, each with the index of its own; ChoiceFinished ends one. Answer i draws
        with kvrelay.sampling.fork_seed(seed, i). What the `cache` arguments and the targets mean is in
        kvrelay.inference.GenerateRequest.

        With `keep_s` the request outlives a lost connection by so many seconds, and its answer its end: the same
        request under the same `request_id` (one is drawn without it) goes on with it, from another process too.

        Raises what refused the request or ended it; AnswerDiffersError where an answer that broke off is computed anew
        and does not go on from what was given. Use contextlib.aclosing around it to leave it early; that ends the
        request, whatever `keep_s` is.
        """
        request = GenerateRequest(
            prompt=prompt,
            sampling=sampling or SamplingParams(),
            request_id=request_id or (secrets.token_hex(16) if keep_s else ""),
            model=model,
            n=n,
            cache_salt=cache_salt,
            public_cache=public_cache,
            cache_ttl_s=cache_ttl_s,
            priority=priority,
            ttft_target_s=ttft_target_s,
            itl_target_s=itl_target_s,
            best_effort=best_effort,
            keep_s=keep_s,
        )
        return FailoverAnswer(self._coordinators, self._first, request, timeout_s, self._prefer).events()

    async def tokenize(self, prompt: Prompt, *, model: str = "") -> tuple[int, ...]:
        """The ids `generate` would use for a text or a chat."""
        return await self._ask(lambda one, timeout_s: one.tokenize(prompt, model, timeout_s))

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        return await self._ask(lambda one, timeout_s: one.detokenize(token_ids, model, timeout_s))

    async def get_model(self, model: str = "") -> ModelInfo:
        return await self._ask(lambda one, timeout_s: one.get_model(model, timeout_s))

    async def list_models(self) -> tuple[ListedModel, ...]:
        """All that are served, ready or not, in the order of the coordinator's settings."""
        return await self._ask(lambda one, timeout_s: one.list_models(timeout_s))

    async def cancel(self, request_id: str) -> None:
        """On every coordinator that has it. Raises NotFoundError when no such request runs."""
        await self._ask_all(lambda one: one.cancel(request_id, self._timeout_s))

    async def explain(self, request_id: str) -> Explanation:
        """Why the request waited, where it went and what it cost. Raises NotFoundError when it is not known, or not any
        more."""
        told = await self._ask_all(lambda one: one.explain(request_id, self._timeout_s))
        return min(told, key=lambda one: _STATES.index(one.state))  # of one that went on elsewhere, where it went on

    async def status(self) -> ClusterStatus:
        return await self._ask(lambda one, timeout_s: one.status(timeout_s))

    def _prefer(self, index: int) -> None:
        self._first = index

    async def _ask(self, call: Callable[[CoordinatorClient, float], Awaitable[T]]) -> T:
        """Of one that answers."""
        deadline, several = time.monotonic() + self._timeout_s, len(self._coordinators) > 1
        rounds = Rounds(len(self._coordinators), self._first, CONTROL_ROUNDS if several else 1)
        while True:
            asked = self._coordinators[rounds.current]
            try:
                result = await call(asked, max(deadline - time.monotonic(), 0.0))
            except UnavailableError as error:
                now = time.monotonic()
                pause_s = rounds.next(error.retry_after_s, now)
                if pause_s is None or now + pause_s >= deadline:
                    raise
            else:
                self._prefer(rounds.current)
                return result
            await asyncio.sleep(pause_s)

    async def _ask_all(self, call: Callable[[CoordinatorClient], Awaitable[T]]) -> list[T]:
        """What those say that know of a request, which any of them may have; at least one reply."""
        replies = await asyncio.gather(*map(call, self._coordinators), return_exceptions=True)
        errors = [reply for reply in replies if isinstance(reply, BaseException)]
        found = [reply for reply in replies if not isinstance(reply, BaseException)]
        if not found:
            raise next((error for error in errors if isinstance(error, NotFoundError)), errors[0])
        return found


class Client:
    """As AsyncClient, blocking. Has an event loop in a thread of its own until closed; may be used by many threads."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        api_key: str | None = None,
        ca: str | Path | None = None,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvrelay-client", daemon=True)
        self._thread.start()
        self._client = self._wait(_make(address, api_key, ca, timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str = "",
        model: str = "",
        n: int = 1,
        cache_salt: str | None = None,
        public_cache: str = "",
        cache_ttl_s: float | None = None,
        priority: int | None = None,
        ttft_target_s: float | None = None,
        itl_target_s: float | None = None,
        best_effort: bool = False,
        keep_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Iterator[AnswerEvent]:
        """As AsyncClient.generate; leaving the loop cancels the request."""
        events = self._client.generate(
            prompt,
            sampling,
            request_id=request_id,
            model=model,
            n=n,
            cache_salt=cache_salt,
            public_cache=public_cache,
            cache_ttl_s=cache_ttl_s,
            priority=priority,
            ttft_target_s=ttft_target_s,
            itl_target_s=itl_target_s,
            best_effort=best_effort,
            keep_s=keep_s,
            timeout_s=timeout_s,
        )
        turns = _Turns(events)
        try:
            while (event := self._wait(turns.next())) is not None:
                yield event
        finally:
            self._wait(turns.close())

    def tokenize(self, prompt: Prompt, *, model: str = "") -> tuple[int, ...]:
        return self._wait(self._client.tokenize(prompt, model=model))

    def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        return self._wait(self._client.detokenize(token_ids, model=model))

    def get_model(self, model: str = "") -> ModelInfo:
        return self._wait(self._client.get_model(model))

    def list_models(self) -> tuple[ListedModel, ...]:
        return self._wait(self._client.list_models())

    def cancel(self, request_id: str) -> None:
        self._wait(self._client.cancel(request_id))

    def explain(self, request_id: str) -> Explanation:
        return self._wait(self._client.explain(request_id))

    def status(self) -> ClusterStatus:
        return self._wait(self._client.status())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupted wait, by Ctrl-C say, ends its call too
            raise


class _Turns:
    """One after another on an answer: Ctrl-C may end a wait at any instruction, and leave the next event waited for
    when the answer is left."""

    def __init__(self, events: AsyncGenerator[AnswerEvent, None]) -> None:
        self._events = events
        self._lock = asyncio.Lock()
        self._waiting: asyncio.Task[object] | None = None

    async def next(self) -> AnswerEvent | None:
        """None at the end."""
        self._waiting = asyncio.current_task()
        async with self._lock:
            return await anext(self._events, None)

    async def close(self) -> None:
        if self._waiting is not None and not self._waiting.cancelling():  # a second time would cut short how it ends
            self._waiting.cancel()
        async with self._lock:
            await self._events.aclose()


async def _make(
    address: str | Sequence[str], api_key: str | None, ca: str | Path | None, timeout_s: float
) -> AsyncClient:
    return AsyncClient(address, api_key=api_key, ca=ca, timeout_s=timeout_s)
