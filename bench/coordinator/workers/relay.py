"""What gRPC itself takes to pass tokens on, one message of a node's in and one for each answer out: no text, no
accounts. Nothing of kvrelay but its messages and options."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import uvloop

from bench.coordinator.fake_nodes import DIRECT
from bench.handoff.conversation import Conversation
from kvrelay.pb import decode_pb2, decode_pb2_grpc, inference_pb2
from kvrelay.rpc import raw
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.process import tune_malloc
from kvrelay.rpc.server import bind, make_server

SERVICE = "kvrelay.pb.Inference"


def main() -> None:
    driver = Conversation()
    tune_malloc()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(driver))


class Node:
    """One stream from a node, whose tokens go to the answers they are for, those that wait together."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = decode_pb2_grpc.DecodeStub(channel).Decode()
        self._one_write = asyncio.Lock()
        self._handles = itertools.count(1)
        self._waiting: dict[int, list[int]] = {}
        self._arrived: dict[int, asyncio.Event] = {}

    async def answer(self) -> AsyncIterator[bytes]:
        handle = next(self._handles)
        waiting, arrived = self._waiting[handle], self._arrived[handle] = [], asyncio.Event()
        wanted = decode_pb2.AnswerWanted(handle=handle, reservation_id=DIRECT)
        await self._tell(decode_pb2.DecodeRequest(wanted=[wanted]))
        try:
            while True:
                await arrived.wait()
                arrived.clear()
                tokens = inference_pb2.TokensGenerated(token_ids=waiting)
                waiting.clear()
                yield inference_pb2.GenerateEvent(tokens=tokens).SerializeToString()
        finally:
            del self._waiting[handle], self._arrived[handle]
            await self._tell(decode_pb2.DecodeRequest(left=[handle]))

    async def _tell(self, request: decode_pb2.DecodeRequest) -> None:
        async with self._one_write:  # gRPC takes one at a time
            await self._call.write(request)

    async def read(self) -> None:
        while (reply := await self._call.read()) is not grpc.aio.EOF:
            for handle, token_id in zip(reply.handles, reply.token_ids, strict=True):
                if handle in self._waiting:
                    self._waiting[handle].append(token_id)
                    self._arrived[handle].set()


async def _serve(driver: Conversation) -> None:
    channels = [open_channel(address, own_connection=True) for address in driver.task["decode"]]
    nodes = [Node(channel) for channel in channels]
    reading = [asyncio.create_task(node.read()) for node in nodes]
    turns = itertools.cycle(nodes)

    async def generate(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        async with aclosing(next(turns).answer()) as messages:
            async for message in messages:
                yield message

    server = make_server()
    server.add_generic_rpc_handlers((raw.raw_methods(SERVICE, unary_stream={"Generate": generate}),))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    driver.tell(address=f"127.0.0.1:{port}")
    await asyncio.to_thread(driver.next_order)
    await server.stop(None)
    for task in reading:
        task.cancel()
    for channel in channels:
        await channel.close()


if __name__ == "__main__":
    main()
