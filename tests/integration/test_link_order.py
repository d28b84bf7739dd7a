"""What prefill_node.pace takes for granted of gRPC: a connection delivers in the order of sending, across streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from kvrelay.rpc import raw, server
from kvrelay.rpc.channel import open_channel
from tests.support.fault_proxy import FaultProxy

MIB = 2**20
RATE = 5e6  # bytes/s: a mebibyte takes 0.2 s
NUM_LARGE = 3


class Arrivals:
    """A server that notes the length of each message, in the order of their arrival."""

    def __init__(self) -> None:
        self.num_bytes: list[int] = []

    async def receive(self, messages: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        async for message in messages:
            self.num_bytes.append(len(message))
            yield b"here"


@pytest.fixture
async def slow() -> AsyncIterator[tuple[grpc.aio.Channel, Arrivals]]:
    arrivals, grpc_server = Arrivals(), server.make_server()
    handler = raw.raw_methods(raw.KV_TRANSFER, stream_stream={"Receive": arrivals.receive})
    grpc_server.add_generic_rpc_handlers((handler,))
    port = server.bind(grpc_server, "127.0.0.1", 0)
    await grpc_server.start()
    with FaultProxy(port) as proxy:
        proxy.throttle(RATE)
        async with open_channel(proxy.address, own_connection=True) as channel:
            yield channel, arrivals
    await grpc_server.stop(None)


@pytest.mark.parametrize("later_s", [0.0, 0.05, 0.15])
async def test_a_small_message_does_not_overtake_large_ones_of_other_streams(
    slow: tuple[grpc.aio.Channel, Arrivals], later_s: float
) -> None:
    """As a BEGIN that is answered would, which is taken to show that all before it has arrived."""
    channel, arrivals = slow
    open_stream = raw.stream_stream(channel, raw.KV_TRANSFER, "Receive")
    large = [open_stream() for _ in range(NUM_LARGE)]
    for call in large:  # as behind a BEGIN of their own
        await call.write(b"begin")
        await call.read()
    sending = [asyncio.create_task(call.write(bytes(MIB + 76))) for call in large]
    await asyncio.wait(sending)
    await asyncio.sleep(later_s)
    small = open_stream()
    await small.write(b"begin")
    async with asyncio.timeout(60.0):
        await small.read()
    assert arrivals.num_bytes == [5] * NUM_LARGE + [MIB + 76] * NUM_LARGE + [5]
    for call in (*large, small):
        call.cancel()
