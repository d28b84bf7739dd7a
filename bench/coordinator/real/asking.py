"""Requests to a real coordinator, of any tenant, and what a client sees of each."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from kvrelay.client_answer import ClientAnswer
from kvrelay.errors import KVRelayError, OverloadedError
from kvrelay.inference import GenerateRequest, RequestFailed, TokenPrompt
from kvrelay.pb import inference_pb2_grpc
from kvrelay.rpc import convert_inference
from kvrelay.rpc.calls import Replies
from kvrelay.rpc.channel import open_channel
from kvrelay.sampling import SamplingParams

TENANT_KEY = "bench-tenant"  # metadata
TIMEOUT_S = 120.0
VOCAB = range(10, 40_000)  # token ids that prompts are drawn of


@dataclass(frozen=True, slots=True)
class Goal:
    """Seconds: until the first token, and between two in the mean of an answer."""

    ttft_s: float
    itl_s: float

    def __str__(self) -> str:
        return f"{self.ttft_s:g} s, {1e3 * self.itl_s:g} ms"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client sends; `tenant` is who it is."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = "default"
    goal: Goal | None = None  # targets that it names

    @property
    def num_tokens(self) -> int:
        """At its longest."""
        return len(self.prompt) + (self.sampling.max_tokens or 0)


@dataclass(slots=True)
class Seen:
    """What came of one sending. `took_s` until its end or its refusal; `told_s` is when to come back, of a refused
    one."""

    asked: Asked
    answer: ClientAnswer
    took_s: float = 0.0
    told_s: float | None = None
    is_return: bool = False  # it came when it was told to

    @property
    def finished(self) -> bool:
        return self.answer.finished is not None

    @property
    def began(self) -> bool:
        return self.answer.first_token_s > 0

    def met(self, goal: Goal) -> bool:
        """It is complete, and came within both."""
        gaps_s = self.answer.gaps_s
        mean_s = sum(gaps_s) / len(gaps_s) if gaps_s else 0.0
        return self.finished and self.answer.first_token_s <= goal.ttft_s and mean_s <= goal.itl_s


class Asker:
    """Belongs to one event loop. Nothing is found cached of what was asked with another `salt`."""

    def __init__(self, address: str, salt: str) -> None:
        self._salt = salt
        self._channel = open_channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def ask(self, asked: Asked, request_id: str = "", *, is_return: bool = False) -> Seen:
        """To its end, or its refusal. Raises KVRelayError for any other failure."""
        seen = Seen(asked, ClientAnswer(time.monotonic()), is_return=is_return)
        await self.ask_into(seen, request_id)
        return seen

    async def ask_into(self, seen: Seen, request_id: str = "") -> None:
        """The same; what came until then is in `seen` when the caller ends it early."""
        asked = seen.asked
        request = GenerateRequest(
            TokenPrompt(asked.prompt),
            asked.sampling,
            request_id,
            cache_salt=self._salt,
            ttft_target_s=asked.goal.ttft_s if asked.goal else None,
            itl_target_s=asked.goal.itl_s if asked.goal else None,
        )
        wire = convert_inference.generate_request_to_pb(request)
        call = self._stub.Generate(wire, timeout=TIMEOUT_S, metadata=((TENANT_KEY, asked.tenant),))
        try:
            async with Replies(call, convert_inference.generate_event_from_pb) as events:
                async for event in events:
                    if isinstance(event, RequestFailed):
                        raise KVRelayError(f"{event.code}: {event.message}")
                    seen.answer.add(event, time.monotonic())
        except OverloadedError as error:
            seen.told_s = error.retry_after_s
        seen.took_s = time.monotonic() - seen.answer.started_at


async def closed_loop(asker: Asker, requests: Iterator[Asked], num_clients: int) -> list[Seen]:
    """All of them: so many clients ask again as soon as they have their answer. Raises what an answer failed of."""
    seen: list[Seen] = []

    async def client() -> None:
        for asked in requests:
            seen.append(await asker.ask(asked))

    async with asyncio.TaskGroup() as clients:
        for _ in range(num_clients):
            clients.create_task(client())
    return seen


@dataclass(slots=True)
class OpenLoop:
    """Requests that come at a pace, whatever becomes of those before. Who is refused and comes `back` does so exactly
    when it was told to, under the same id, if the load still lasts then."""

    asker: Asker
    per_s: float
    back: bool = False
    seen: list[Seen] = field(default_factory=list)  # every sending

    async def run(self, requests: Iterator[Asked], seconds: float, grace_s: float, seed: int = 0) -> None:
        """`grace_s` is what the last ones have after the load ends; then what still runs is ended. Raises what an
        answer failed of."""
        draw, began = random.Random(seed), time.monotonic()
        ends_at = began + seconds
        due, asking = began, list[asyncio.Task[None]]()
        for number in itertools.count():
            due += draw.expovariate(self.per_s)
            if due >= ends_at:
                break
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            asking.append(asyncio.create_task(self._ask(next(requests), f"r{seed}-{number}", ends_at)))
        await asyncio.sleep(max(0.0, ends_at - time.monotonic()))
        done, _ = await asyncio.wait(asking, timeout=grace_s)
        await _end(asking)
        for task in done:
            task.result()

    async def _ask(self, asked: Asked, request_id: str, ends_at: float) -> None:
        is_return = False
        while True:
            seen = Seen(asked, ClientAnswer(time.monotonic()), is_return=is_return)
            self.seen.append(seen)
            await self.asker.ask_into(seen, request_id)
            told_s = seen.told_s
            if told_s is None or not self.back or time.monotonic() + told_s >= ends_at:
                return
            await asyncio.sleep(told_s)
            is_return = True


async def capacity_per_s(asker: Asker, requests: Iterator[Asked], num_clients: int) -> float:
    """Requests a second that the cluster ends while it never lacks any: without the first ones, before which it is not
    in its stride, and the last, which leave it idle. They are three times as many as clients at least."""
    seen = await closed_loop(asker, requests, num_clients)
    ends = sorted(one.answer.started_at + one.took_s for one in seen)
    later = ends[num_clients // 2 : -num_clients]
    return (len(later) - 1) / (later[-1] - later[0])


def drawn(draw: random.Random, count: int) -> tuple[int, ...]:
    """A prompt, or part of one, that nobody has seen."""
    return tuple(draw.choices(VOCAB, k=count))


def greedy(max_tokens: int) -> SamplingParams:
    """An answer of exactly so many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def endless(make: Callable[[int], Asked]) -> Iterator[Asked]:
    return map(make, itertools.count())


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
