"""A process that asks nodes as a coordinator would, and looks at the clock."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop
from prometheus_client.parser import text_string_to_metric_families

from bench.handoff.conversation import Conversation
from kvrelay.messages import (
    DecodeFinished,
    HandoffTarget,
    NodeRequest,
    PrefillFinished,
    ReservationGranted,
    TokensDecoded,
)
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.nodes import DecodeClient, PrefillClient
from kvrelay.sampling import SamplingParams
from kvrelay.types import RequestId

TIMEOUT_S = 300.0
RESERVE_TIMEOUT_S = 10.0
TAIL_METRIC = "kvrelay_handoff_tail_seconds_sum"
ANSWER_TOKENS = 2
ENDLESS_TOKENS = 4_000

Order = dict[str, Any]


def main() -> None:
    driver = Conversation()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work(driver))


async def _work(driver: Conversation) -> None:
    task = driver.task
    async with (
        open_channel(task["decode"], own_connection=True) as decode,
        open_channel(task.get("prefill", task["decode"]), own_connection=True) as prefill,
    ):
        client = Client(DecodeClient(decode), PrefillClient(prefill), task)
        driver.tell(ready=True)
        while order := await asyncio.to_thread(driver.next_order):
            driver.tell(**await client.obey(order))


class Client:
    def __init__(self, decode: DecodeClient, prefill: PrefillClient, task: Order) -> None:
        self._decode = decode
        self._prefill = prefill
        self._task = task
        self._draw = random.Random(task["seed"])
        self._ids = itertools.count(1)
        self._running: list[asyncio.Task[None]] = []
        self._arrivals: list[list[float]] = []

    async def obey(self, order: Order) -> dict[str, object]:
        does: dict[str, Callable[[Order], Awaitable[dict[str, object]]]] = {
            "handoff": self._hand_over,
            "colocated": self._colocated,
            "begin": self._begin,
            "gaps": self._gaps,
            "end": self._end,
        }
        async with asyncio.timeout(TIMEOUT_S):
            return await does[order["do"]](order)

    async def _hand_over(self, order: Order) -> dict[str, object]:
        """Time to the first token, which a prefill node computes and a decode node tells; and the handoff's tail."""
        request = self._request(order["num_tokens"], ANSWER_TOKENS)
        tail_before = self._tail_metric()
        started = time.perf_counter()
        granted = await self._reserve(request)
        reading = asyncio.create_task(self._first_token(granted))
        finished = await self._compute(request, granted)
        first_at = await reading
        tail_s = self._tail_metric() - tail_before
        return {"ttft_s": first_at - started, "tail_s": tail_s, "compute_s": finished.compute_s}

    async def _colocated(self, order: Order) -> dict[str, object]:
        """Time to the first token of a node that computes the prompt itself, and decodes it."""
        request = self._request(order["num_tokens"], ANSWER_TOKENS)
        started = time.perf_counter()
        first_at = await self._first_token(await self._reserve(request), compute_tail=True)
        return {"ttft_s": first_at - started}

    async def _begin(self, order: Order) -> dict[str, object]:
        """Starts answers that do not end by themselves; returns when each has its first tokens."""
        requests = [self._request(order["num_tokens"], ENDLESS_TOKENS) for _ in range(order["batch"])]
        self._arrivals = [[] for _ in requests]
        begun = [asyncio.Event() for _ in requests]
        self._running = [
            asyncio.create_task(self._read(await self._reserve(request), arrivals, event))
            for request, arrivals, event in zip(requests, self._arrivals, begun, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        return {"running": len(requests)}

    async def _gaps(self, order: Order) -> dict[str, object]:
        """Times between arrivals of each answer's tokens, of all answers, for so long from now."""
        for arrivals in self._arrivals:
            del arrivals[:-1]
        await asyncio.sleep(order["seconds"])
        gaps_s = [later - earlier for arrivals in self._arrivals for earlier, later in itertools.pairwise(arrivals)]
        for task in self._running:
            if task.done():
                task.result()
        if not gaps_s:
            raise RuntimeError(f"no answer had two tokens within {order['seconds']:g} s; is the machine busy?")
        return {"gaps_s": gaps_s}

    async def _end(self, order: Order) -> dict[str, object]:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running = []
        return {"running": 0}

    async def _read(self, granted: ReservationGranted, arrivals: list[float], begun: asyncio.Event) -> None:
        async with self._decode.decode(granted.reservation_id, compute_tail=True) as events:
            async for event in events:
                if isinstance(event, DecodeFinished):
                    raise AssertionError("an answer ended before the measurement did")
                arrivals.append(time.perf_counter())
                begun.set()

    async def _reserve(self, request: NodeRequest) -> ReservationGranted:
        num_tokens = len(request.token_ids) + (request.sampling.max_tokens or 0)
        return await self._decode.reserve(request, num_tokens, RESERVE_TIMEOUT_S)

    async def _first_token(self, granted: ReservationGranted, *, compute_tail: bool = False) -> float:
        """When it came; reads to the end."""
        first_at = 0.0
        async with self._decode.decode(granted.reservation_id, compute_tail) as events:
            async for event in events:
                if isinstance(event, TokensDecoded):
                    first_at = first_at or time.perf_counter()
        return first_at

    async def _compute(self, request: NodeRequest, granted: ReservationGranted) -> PrefillFinished:
        target = HandoffTarget(self._task["decode"], granted.instance_id, granted.reservation_id, 1, 0)
        async with self._prefill.prefill(request, target) as events:
            finished = [event async for event in events][-1]
        if not isinstance(finished, PrefillFinished):
            raise AssertionError(f"the prefill ended with {finished}")
        return finished

    def _request(self, num_tokens: int, max_tokens: int) -> NodeRequest:
        token_ids = tuple(self._draw.choices(range(3, self._task["vocab_size"]), k=num_tokens))
        sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True)
        return NodeRequest(RequestId(f"bench-{next(self._ids)}"), token_ids, num_tokens, sampling)

    def _tail_metric(self) -> float:
        """Seconds of all handoffs so far, of the prefill node."""
        url = f"http://127.0.0.1:{self._task['metrics_port']}/metrics"
        with urllib.request.urlopen(url, timeout=RESERVE_TIMEOUT_S) as reply:
            text = reply.read().decode()
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return next(sample.value for sample in samples if sample.name == TAIL_METRIC)


if __name__ == "__main__":
    main()
