"""A process that asks a coordinator, or the nodes themselves, and counts what comes: as cheaply as grpc.aio can."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import uvloop

from bench.coordinator.fake_nodes import DIRECT
from bench.coordinator.stamps import FIRST_ID, age_s
from bench.handoff.conversation import Conversation
from bench.handoff.pace import cpu_seconds
from kvrelay.pb import decode_pb2, decode_pb2_grpc, inference_pb2, types_pb2
from kvrelay.rpc import raw
from kvrelay.rpc.channel import cancelling, open_channel

NUM_CONNECTIONS = 8
PROMPT_TOKENS = 100  # of answers without end: enough to be handed over
TIMEOUT_S = 120.0
ENDLESS_TOKENS = 2_000_000
SETTLE_S = 1.0

Order = dict[str, Any]
Begin = Callable[[], grpc.aio.UnaryStreamCall[bytes, bytes]]


@dataclass(slots=True)
class Tally:
    """Of all streams, since it was last emptied."""

    num_tokens: int = 0
    num_events: int = 0
    num_finished: int = 0
    num_failed: int = 0
    ages_s: list[float] = field(default_factory=list)  # of each token when it came
    times_s: list[float] = field(default_factory=list)  # that each finished or failed call took


def main() -> None:
    driver = Conversation()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work(driver))


async def _work(driver: Conversation) -> None:
    client = Client(driver.task)
    driver.tell(ready=True)
    while order := await asyncio.to_thread(driver.next_order):
        async with asyncio.timeout(TIMEOUT_S):
            driver.tell(**await client.obey(order))
    await client.close()


class Client:
    def __init__(self, task: Order) -> None:
        self._pids: dict[str, int] = task["pids"]
        self._channels = [open_channel(task["address"], own_connection=True) for _ in range(NUM_CONNECTIONS)]
        self._asking = itertools.cycle(
            [raw.unary_stream(channel, "kvrelay.pb.Inference", "Generate") for channel in self._channels]
        )
        self._straight = [open_channel(address, own_connection=True) for address in task["decode"]]
        self._tally = Tally()
        self._reading: list[asyncio.Task[None]] = []

    async def close(self) -> None:
        for channel in (*self._channels, *self._straight):
            await channel.close()

    async def obey(self, order: Order) -> dict[str, object]:
        does: dict[str, Callable[[Order], Awaitable[dict[str, object]]]] = {
            "open": self._open,
            "watch": self._watch,
            "ask": self._ask,
            "keep": self._keep,
            "knock": self._knock,
            "close": self._close,
        }
        return await does[order["do"]](order)

    async def _open(self, order: Order) -> dict[str, object]:
        """So many answers without end, read side by side; returns when each has begun."""
        begun = [asyncio.Event() for _ in range(order["num_streams"])]
        reading = self._straight_from_nodes(begun) if order["straight"] else self._through(begun)
        self._reading = [asyncio.create_task(one) for one in reading]
        all_begun = asyncio.gather(*(event.wait() for event in begun))
        await asyncio.wait([all_begun, *self._reading], return_when=asyncio.FIRST_COMPLETED)
        if not all_begun.done():
            all_begun.cancel()
            await asyncio.gather(all_begun, return_exceptions=True)
            await self._close({})
            raise RuntimeError("an answer ended before it was to")
        return {"open": len(begun)}

    async def _watch(self, order: Order) -> dict[str, object]:
        """What comes of the open streams in so many seconds."""
        await asyncio.sleep(SETTLE_S)
        return await self._measured(asyncio.sleep(order["seconds"]))

    async def _ask(self, order: Order) -> dict[str, object]:
        """So many clients that ask again whenever they have their answer, for so long."""
        begin = self._begin(order["prompt_tokens"], order["max_tokens"])
        self._reading = [asyncio.create_task(self._ask_again(begin)) for _ in range(order["num_clients"])]
        report = await self._watch(order)
        await self._close(order)
        return report

    async def _keep(self, order: Order) -> dict[str, object]:
        """So many requests, of which those that are accepted stay."""
        begin = self._begin(order["prompt_tokens"], order["max_tokens"])
        self._reading = [asyncio.create_task(self._ask_once(begin)) for _ in range(order["num_requests"])]
        num_before, num_kept = -1, len(self._reading)
        while num_kept != num_before:  # the last refusals are out
            await asyncio.sleep(SETTLE_S)
            num_before, num_kept = num_kept, sum(not task.done() for task in self._reading)
        return {"kept": num_kept}

    async def _knock(self, order: Order) -> dict[str, object]:
        """So many requests, so many a second, whether those before were answered or not."""
        begin = self._begin(order["prompt_tokens"], order["max_tokens"])

        async def knock() -> None:
            asking = []
            for _ in range(order["num_requests"]):
                asking.append(asyncio.create_task(self._ask_once(begin)))
                await asyncio.sleep(1 / order["per_second"])
            await asyncio.gather(*asking)

        return await self._measured(knock())

    async def _close(self, order: Order) -> dict[str, object]:
        """Ends what is open. Raises what a stream failed with before."""
        reading, self._reading = self._reading, []
        failed = [task for task in reading if task.done()]
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        for task in failed:
            task.result()
        return {"open": 0}

    async def _measured(self, work: Awaitable[object]) -> dict[str, object]:
        """What comes meanwhile, and the CPU time that each process takes."""
        tally = self._tally = Tally()
        before, began = self._cpu_seconds(), time.monotonic()
        await work
        wall_s = time.monotonic() - began
        cpu_s = {name: later - before[name] for name, later in self._cpu_seconds().items()}
        if not tally.num_events and not tally.times_s:
            raise RuntimeError(f"nothing came within {wall_s:.1f} s; is the machine busy?")
        return {name: getattr(tally, name) for name in Tally.__slots__} | {"wall_s": wall_s, "cpu_s": cpu_s}

    def _cpu_seconds(self) -> dict[str, float]:
        return {name: cpu_seconds(pid) for name, pid in self._pids.items()} | {"client": time.process_time()}

    def _begin(self, prompt_tokens: int, max_tokens: int) -> Begin:
        request = inference_pb2.GenerateRequest(
            token_ids=types_pb2.TokenIds(ids=range(FIRST_ID, FIRST_ID + prompt_tokens)),
            sampling=types_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        ).SerializeToString()
        return lambda: next(self._asking)(request)

    def _through(self, begun: list[asyncio.Event]) -> Iterator[Coroutine[Any, Any, None]]:
        begin = self._begin(PROMPT_TOKENS, ENDLESS_TOKENS)
        return (self._read(begin(), event) for event in begun)

    def _straight_from_nodes(self, begun: list[asyncio.Event]) -> Iterator[Coroutine[Any, Any, None]]:
        """A stream a node, with its share of the answers."""
        for number, channel in enumerate(self._straight):
            yield self._read_node(channel, dict(enumerate(begun[number :: len(self._straight)], start=1)))

    async def _ask_again(self, begin: Begin) -> None:
        while True:
            await self._ask_once(begin)

    async def _ask_once(self, begin: Begin) -> None:
        """Until the end, or the refusal."""
        began = time.monotonic()
        try:
            await self._read(begin())
            self._tally.num_finished += 1
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            self._tally.num_failed += 1
        self._tally.times_s.append(time.monotonic() - began)

    async def _read(self, call: grpc.aio.UnaryStreamCall[bytes, bytes], begun: asyncio.Event | None = None) -> None:
        parse = inference_pb2.GenerateEvent.FromString
        async with cancelling(call):
            while (message := await call.read()) is not grpc.aio.EOF:
                event = parse(message)
                if event.HasField("tokens"):
                    self._count(event.tokens.token_ids)
                    if begun is not None:
                        begun.set()

    async def _read_node(self, channel: grpc.aio.Channel, begun: dict[int, asyncio.Event]) -> None:
        async with cancelling(decode_pb2_grpc.DecodeStub(channel).Decode()) as call:
            wanted = [decode_pb2.AnswerWanted(handle=handle, reservation_id=DIRECT) for handle in begun]
            await call.write(decode_pb2.DecodeRequest(wanted=wanted))
            while (reply := await call.read()) is not grpc.aio.EOF:
                self._count(reply.token_ids)
                for handle in reply.handles if begun else ():
                    if event := begun.pop(handle, None):
                        event.set()

    def _count(self, token_ids: Any) -> None:
        tally, now_ns = self._tally, time.monotonic_ns()
        tally.num_events += 1
        tally.num_tokens += len(token_ids)
        tally.ages_s.extend(age_s(token_id, now_ns) for token_id in token_ids)


if __name__ == "__main__":
    main()
