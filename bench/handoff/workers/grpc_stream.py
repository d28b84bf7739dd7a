"""What grpc.aio itself takes: the same 1 MiB message over and over, dropped where it arrives. Nothing of kvrelay.

`window` messages may be unanswered; 0: the receiver answers only the last. No copy into or out of a pool, no checksum.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from bench.handoff.conversation import Conversation
from bench.handoff.transfers import NUM_WARM_UP, Meter
from kvrelay.rpc import raw
from kvrelay.rpc.channel import cancelling, open_channel
from kvrelay.rpc.process import tune_malloc
from kvrelay.rpc.server import bind, make_server

SERVICE = "bench.GRPC"
MESSAGE_BYTES = 2**20
LAST = b"last"


def main() -> None:
    driver = Conversation()
    tune_malloc()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_send(driver) if "port" in driver.task else _receive(driver))


async def _receive(driver: Conversation) -> None:
    answers_each = driver.task["window"] > 0

    async def drop(messages: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            if answers_each or message == LAST:
                yield b"!"

    server = make_server()
    server.add_generic_rpc_handlers((raw.raw_methods(SERVICE, stream_stream={"Drop": drop}),))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    driver.tell(port=port)
    await asyncio.to_thread(driver.next_order)
    await server.stop(None)


async def _send(driver: Conversation) -> None:
    task = driver.task
    async with open_channel(f"127.0.0.1:{task['port']}", own_connection=True) as channel:
        call = raw.stream_stream(channel, SERVICE, "Drop")()
        async with cancelling(call):
            driver.tell(ready=True)
            while order := await asyncio.to_thread(driver.next_order):
                driver.tell(**await _measure(call, task, order["seconds"]))


async def _measure(
    call: grpc.aio.StreamStreamCall[bytes, bytes], task: dict[str, Any], seconds: float
) -> dict[str, float]:
    num_messages, message = task["num_bytes"] // MESSAGE_BYTES, bytes(MESSAGE_BYTES)
    for _ in range(NUM_WARM_UP):
        await _transfer(call, message, num_messages, task["window"])
    meter = Meter(task["peer_pid"])
    while not meter.num_bytes or meter.wall_s < seconds:
        meter.start()
        await _transfer(call, message, num_messages, task["window"])
        meter.stop(num_messages * MESSAGE_BYTES)
    return meter.report()


async def _transfer(
    call: grpc.aio.StreamStreamCall[bytes, bytes], message: bytes, num_messages: int, window: int
) -> None:
    room = asyncio.Semaphore(window or num_messages)
    reader = asyncio.create_task(_read(call, room, num_messages + 1 if window else 1))
    for _ in range(num_messages):
        await room.acquire()
        await call.write(message)
    await call.write(LAST)
    await reader


async def _read(call: grpc.aio.StreamStreamCall[bytes, bytes], room: asyncio.Semaphore, num_answers: int) -> None:
    for _ in range(num_answers):
        await call.read()
        room.release()


if __name__ == "__main__":
    main()
