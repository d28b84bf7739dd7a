"""What grpc.aio itself takes to pass messages on: no parsing, no text, no queue. Nothing of kvrelay but its options."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from bench.coordinator.fake_nodes import DIRECT
from bench.handoff.conversation import Conversation
from kvrelay.pb import decode_pb2
from kvrelay.rpc import raw
from kvrelay.rpc.channel import cancelling, open_channel
from kvrelay.rpc.process import tune_malloc
from kvrelay.rpc.server import bind, make_server

SERVICE = "kvrelay.pb.Inference"


def main() -> None:
    driver = Conversation()
    tune_malloc()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(driver))


async def _serve(driver: Conversation) -> None:
    channels = [open_channel(address, own_connection=True) for address in driver.task["decode"]]
    turns = itertools.cycle([raw.unary_stream(channel, "kvrelay.pb.Decode", "Decode") for channel in channels])
    request = decode_pb2.DecodeRequest(reservation_id=DIRECT).SerializeToString()

    async def generate(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        async with cancelling(next(turns)(request)) as call:
            while (message := await call.read()) is not grpc.aio.EOF:
                yield message

    server = make_server()
    server.add_generic_rpc_handlers((raw.raw_methods(SERVICE, unary_stream={"Generate": generate}),))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    driver.tell(address=f"127.0.0.1:{port}")
    await asyncio.to_thread(driver.next_order)
    await server.stop(None)
    for channel in channels:
        await channel.close()


if __name__ == "__main__":
    main()
