"""A process that hands over KV, and asks small things of the same peer on the same connection meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.handoff.conversation import Conversation
from bench.handoff.pace import FULL, NONE
from bench.handoff.receiving import TICKS
from bench.handoff.replay import Replay
from bench.handoff.shapes import info_of
from bench.handoff.transfers import NUM_WARM_UP, Meter
from bench.handoff.workers.receiver import read_tls
from kvrelay.rpc import raw
from kvrelay.rpc.channel import cancelling, open_channel
from kvrelay.rpc.process import tune_malloc

PING_S = 0.005
CALL_TIMEOUT_S = 10.0

Order = dict[str, Any]


def main() -> None:
    driver = Conversation()
    tune_malloc()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work(driver))


async def _work(driver: Conversation) -> None:
    task = driver.task
    address = f"127.0.0.1:{task['port']}"
    async with open_channel(address, own_connection=True, tls=read_tls(task)) as channel:
        replay = Replay(channel, address, info_of(task["shape"]), task["num_blocks"])
        sender = Sender(channel, replay, task["peer_pid"])
        driver.tell(ready=True)
        while order := await asyncio.to_thread(driver.next_order):
            driver.tell(**await sender.obey(order))


class Sender:
    def __init__(self, channel: grpc.aio.Channel, replay: Replay, peer_pid: int) -> None:
        self._channel = channel
        self._replay = replay
        self._peer_pid = peer_pid
        self._load: Load | None = None

    async def obey(self, order: Order) -> dict[str, object]:
        does: dict[str, Callable[[Order], Awaitable[dict[str, object]]]] = {
            "transfer": self._transfer,
            "ping": self._ping,
            "ticks": self._ticks,
            "load": self._begin_load,
            "unload": self._end_load,
        }
        return await does[order["do"]](order)

    async def _transfer(self, order: Order) -> dict[str, object]:
        for _ in range(NUM_WARM_UP):
            await self._replay.hand_over()
        meter = Meter(self._peer_pid)
        while not meter.num_bytes or meter.wall_s < order["seconds"]:
            await self._replay.hand_over(FULL, meter)
        return {**meter.report()}

    async def _ping(self, order: Order) -> dict[str, object]:
        """Round trips of a unary call, one after another with a pause between them."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)
        async with self._loaded(order["bytes_per_s"]):
            times_s, until = [], time.monotonic() + order["seconds"]
            while time.monotonic() < until:
                started = time.perf_counter()
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)
                times_s.append(time.perf_counter() - started)
                await asyncio.sleep(PING_S)
        return {"times_s": times_s}

    async def _ticks(self, order: Order) -> dict[str, object]:
        """Times between the messages of a stream that sends one every 10 ms."""
        call = raw.unary_stream(self._channel, TICKS, "Tick")(b"", timeout=order["seconds"] + CALL_TIMEOUT_S)
        async with cancelling(call), self._loaded(order["bytes_per_s"]):
            await call.read()
            times_s, last, until = [], time.perf_counter(), time.monotonic() + order["seconds"]
            while time.monotonic() < until:
                await call.read()
                now = time.perf_counter()
                times_s.append(now - last)
                last = now
        return {"times_s": times_s}

    async def _begin_load(self, order: Order) -> dict[str, object]:
        self._load = Load(self._replay, order["bytes_per_s"])
        await self._load.begun()
        return {"loading": True}

    async def _end_load(self, order: Order) -> dict[str, object]:
        assert self._load is not None
        return {"bytes_per_s": await self._load.end()}

    @asynccontextmanager
    async def _loaded(self, bytes_per_s: float) -> AsyncIterator[None]:
        if bytes_per_s == NONE:
            yield
            return
        load = Load(self._replay, bytes_per_s)
        await load.begun()
        try:
            yield
        finally:
            await load.end()


class Load:
    """Handoffs one after another, in the background."""

    def __init__(self, replay: Replay, bytes_per_s: float) -> None:
        self._replay = replay
        self._started = time.perf_counter()
        self._before = replay.num_bytes
        replay.left.clear()
        self._task = asyncio.create_task(self._run(bytes_per_s))

    async def begun(self) -> None:
        """Returns when the first block has left. Raises what ended it before that."""
        left = asyncio.create_task(self._replay.left.wait())
        try:
            done, _ = await asyncio.wait((left, self._task), timeout=CALL_TIMEOUT_S, return_when="FIRST_COMPLETED")
        finally:
            left.cancel()
        if not done:
            raise TimeoutError(f"no block left within {CALL_TIMEOUT_S:g} s")
        if self._task in done:
            self._task.result()

    async def end(self) -> float:
        """The bytes a second that left. Raises what ended it sooner."""
        rate = (self._replay.num_bytes - self._before) / (time.perf_counter() - self._started)
        ended = self._task.done()
        self._task.cancel()
        outcome = (await asyncio.gather(self._task, return_exceptions=True))[0]
        if ended and isinstance(outcome, Exception):
            raise outcome
        return rate

    async def _run(self, bytes_per_s: float) -> None:
        while True:
            await self._replay.hand_over(bytes_per_s)


if __name__ == "__main__":
    main()
