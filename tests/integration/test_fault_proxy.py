"""The fault proxy of the tests, between real ends: each fault does what it says, to the link it names."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest

from kvrelay.errors import CorruptBlockError
from kvrelay.kv.frame import FrameKind, block_frame, control_frame, decode, encode, verify
from kvrelay.rpc import raw
from kvrelay.rpc.channel import cancelling, open_channel
from kvrelay.types import BlockHash
from tests.support.fault_proxy import FaultProxy
from tests.support.grpc_ends import serving
from tests.support.link_faults import Direction

HASH = BlockHash(bytes(range(32)))
SLAB = bytes(range(256)) * 400  # several DATA frames
TIMEOUT_S = 60.0

CLIENT = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as end:
    for line in sys.stdin:
        end.sendall(line.encode())
        print(end.recv(100).decode(), end="", flush=True)
"""


# Plain TCP


@pytest.fixture
def echo_port() -> Iterator[int]:
    """A server that sends back what it gets."""

    def serve(end: socket.socket) -> None:
        with end, suppress(OSError):
            while data := end.recv(65_536):
                end.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def echo(echo_port: int) -> Iterator[FaultProxy]:
    with FaultProxy(echo_port, frames=False) as proxy:
        yield proxy


def connect(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), TIMEOUT_S)


def says(end: socket.socket, words: bytes) -> bytes:
    end.sendall(words)
    return end.recv(100)


def test_a_pause_holds_bytes_and_connections(echo: FaultProxy) -> None:
    with connect(echo) as end:
        assert says(end, b"one") == b"one"
        echo.pause()
        end.sendall(b"two")
        end.settimeout(0.2)
        with pytest.raises(TimeoutError):
            end.recv(100)
        with connect(echo) as later:
            later.sendall(b"three")
            echo.resume()
            assert (end.recv(100), later.recv(100)) == (b"two", b"three")


def test_a_cut_resets_connections_old_and_new_until_it_heals(echo: FaultProxy) -> None:
    with connect(echo) as end:
        assert says(end, b"one") == b"one"
        echo.cut()
        with pytest.raises(ConnectionError):
            end.recv(100)
    with connect(echo) as end, pytest.raises(ConnectionError):
        end.recv(100)
    echo.heal()
    with connect(echo) as end:
        assert says(end, b"two") == b"two"


def test_a_reset_is_over_at_once(echo: FaultProxy) -> None:
    with connect(echo) as end:
        assert says(end, b"one") == b"one"
        echo.reset()
        with pytest.raises(ConnectionError):
            end.recv(100)
    with connect(echo) as end:
        assert says(end, b"two") == b"two"


def test_a_throttle_bounds_the_rate_in_each_direction(echo: FaultProxy) -> None:
    echo.throttle(200_000)
    with connect(echo) as end:
        started, received = time.monotonic(), 0
        end.sendall(bytes(60_000))
        while received < 60_000:
            received += len(end.recv(65_536))
        assert time.monotonic() - started > 0.28


def test_raw_corruption_flips_one_bit(echo: FaultProxy) -> None:
    with connect(echo) as end:
        echo.corrupt_raw()
        assert says(end, b"aaa") == b"a`a"
        echo.corrupt_raw(direction=Direction.TO_CLIENT)
        assert says(end, b"aaa") == b"a`a"
        assert says(end, b"aaa") == b"aaa"


def test_a_fault_of_one_process_leaves_the_others_alone(echo: FaultProxy) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(echo.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None

        def other_says(words: bytes) -> bytes:
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdin.write(words)
            other.stdin.flush()
            return other.stdout.readline()

        with connect(echo) as end:
            assert (says(end, b"one\n"), other_says(b"one\n")) == (b"one\n", b"one\n")
            echo.pause(os.getpid())
            end.sendall(b"two\n")
            assert other_says(b"two\n") == b"two\n"
            echo.resume(os.getpid())
            assert end.recv(100) == b"two\n"
            echo.pause(other.pid)
            assert says(end, b"three\n") == b"three\n"
            other.stdin.write(b"four\n")
            other.stdin.flush()
            end.settimeout(0.2)
            assert says(end, b"five\n") == b"five\n"
            echo.resume(other.pid)
            assert other.stdout.readline() == b"four\n"
            echo.cut(other.pid)
            assert says(end, b"six\n") == b"six\n"
            with suppress(BrokenPipeError):
                other.stdin.write(b"seven\n")
                other.stdin.flush()
            assert other.wait(TIMEOUT_S) != 0
        with suppress(BrokenPipeError):
            other.stdin.close()


def test_a_server_that_is_not_there_is_a_reset_and_may_come_later(echo_port: int) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen; a port that is let go another server may have by then
        with FaultProxy(nobody.getsockname()[1]) as proxy, connect(proxy) as end, pytest.raises(ConnectionError):
            end.recv(100)


# KV streams


class Receiver:
    """Answers each frame with its kind; `frames` is what came, `waiting` hears of it."""

    def __init__(self) -> None:
        self.kinds: list[FrameKind] = []
        self.num_corrupt = 0
        self.num_ended = 0
        self.changed = asyncio.Condition()

    def handler(self) -> Any:
        return raw.raw_methods(raw.KV_TRANSFER, stream_stream={"Receive": self.receive})

    async def receive(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        try:
            async for message in messages:
                (frame,) = decode(message, max_payload_bytes=len(SLAB))
                try:
                    verify(frame)
                except CorruptBlockError:
                    self.num_corrupt += 1
                self.kinds.append(frame.kind)
                await self._tell()
                yield bytes((frame.kind,))
        finally:
            self.num_ended += 1
            await self._tell()

    async def until(self, is_so: Callable[[Receiver], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S), self.changed:
            await self.changed.wait_for(lambda: is_so(self))

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()


FRAMES = [
    encode(control_frame(FrameKind.BEGIN, b"begin")),
    *(encode(block_frame(index, HASH, SLAB)) for index in range(3)),
    encode(control_frame(FrameKind.END, b"end")),
]
BEGIN, BLOCK, END = FrameKind.BEGIN, FrameKind.BLOCK, FrameKind.END


@pytest.fixture
async def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
async def proxy(receiver: Receiver) -> AsyncIterator[FaultProxy]:
    async with serving(lambda server: server.add_generic_rpc_handlers((receiver.handler(),))) as port:
        with FaultProxy(port) as proxy:
            yield proxy


@pytest.fixture
async def channel(proxy: FaultProxy) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(proxy.address) as channel:
        yield channel


async def send(channel: grpc.aio.Channel) -> list[int]:
    """The kinds that were acknowledged."""
    acknowledged = []
    async with asyncio.timeout(TIMEOUT_S), cancelling(raw.stream_stream(channel, raw.KV_TRANSFER, "Receive")()) as call:
        for message in FRAMES:
            await call.write(message)
        await call.done_writing()
        async for reply in call:
            acknowledged.append(reply[0])
    return acknowledged


@pytest.mark.parametrize(
    ("kind", "nth", "before"),
    [(BEGIN, 1, []), (BLOCK, 1, [BEGIN]), (BLOCK, 3, [BEGIN, BLOCK, BLOCK]), (END, 1, [BEGIN, BLOCK, BLOCK, BLOCK])],
)
async def test_a_hold_stops_one_stream_exactly_before_the_frame_and_no_other_stream(
    proxy: FaultProxy, channel: grpc.aio.Channel, receiver: Receiver, kind: FrameKind, nth: int, before: list[int]
) -> None:
    hold = proxy.hold(kind, nth)
    held = asyncio.create_task(send(channel))
    await hold.reached()
    await receiver.until(lambda it: it.kinds == before)
    assert await send(channel) == [BEGIN, BLOCK, BLOCK, BLOCK, END]
    assert receiver.kinds == [*before, BEGIN, BLOCK, BLOCK, BLOCK, END]
    assert not held.done()
    hold.release()
    assert await held == [BEGIN, BLOCK, BLOCK, BLOCK, END]
    assert proxy.num_kv_frames[Direction.TO_SERVER, BLOCK] == 6
    assert receiver.num_corrupt == 0


async def test_one_stream_may_stop_at_several_stages(
    proxy: FaultProxy, channel: grpc.aio.Channel, receiver: Receiver
) -> None:
    first, last = proxy.hold(BLOCK, 2), proxy.hold(END)
    held = asyncio.create_task(send(channel))
    await first.reached()
    first.release()
    await last.reached()
    await receiver.until(lambda it: len(it.kinds) == 4)
    proxy.heal()
    assert await held == [BEGIN, BLOCK, BLOCK, BLOCK, END]


async def test_a_hold_may_be_for_the_streams_of_one_process(proxy: FaultProxy, channel: grpc.aio.Channel) -> None:
    nobody = 2**22 + 1  # above Linux's largest pid
    hold = proxy.hold(BEGIN, pid=nobody)
    assert await send(channel) == [BEGIN, BLOCK, BLOCK, BLOCK, END]
    assert not hold.is_reached
    hold = proxy.hold(BEGIN, pid=os.getpid())
    held = asyncio.create_task(send(channel))
    await hold.reached()
    hold.release()
    assert await held == [BEGIN, BLOCK, BLOCK, BLOCK, END]


async def test_a_reply_may_be_held_and_what_follows_it_comes_after(
    proxy: FaultProxy, channel: grpc.aio.Channel, receiver: Receiver
) -> None:
    hold = proxy.hold_reply(lambda head: head == bytes((BLOCK,)))
    sending = [asyncio.create_task(send(channel)) for _ in range(3)]
    await hold.reached()
    await receiver.until(lambda it: it.kinds.count(END) == 3)  # only replies wait
    assert not any(task.done() for task in sending)
    hold.release()
    assert await asyncio.gather(*sending) == [[BEGIN, BLOCK, BLOCK, BLOCK, END]] * 3
    assert await send(channel) == [BEGIN, BLOCK, BLOCK, BLOCK, END]


async def test_a_call_that_is_cancelled_while_held_ends_at_the_server_and_the_connection_goes_on(
    proxy: FaultProxy, channel: grpc.aio.Channel, receiver: Receiver
) -> None:
    for number in range(1, 9):
        hold = proxy.hold(BLOCK, 2)
        held = asyncio.create_task(send(channel))
        await hold.reached()
        held.cancel()
        with suppress(asyncio.CancelledError):
            await held
        await receiver.until(lambda it, ended=number: it.num_ended == ended)  # type: ignore[misc]
        hold.release()
    assert await send(channel) == [BEGIN, BLOCK, BLOCK, BLOCK, END]


async def test_corruption_hits_the_payload_of_the_next_frame_of_its_kind_alone(
    proxy: FaultProxy, channel: grpc.aio.Channel, receiver: Receiver
) -> None:
    proxy.corrupt(BLOCK)
    assert await send(channel) == [BEGIN, BLOCK, BLOCK, BLOCK, END]
    assert receiver.num_corrupt == 1
    await send(channel)
    assert receiver.num_corrupt == 1


async def test_a_paused_link_is_found_by_keepalive(proxy: FaultProxy, channel: grpc.aio.Channel) -> None:
    hold = proxy.hold(END)
    held = asyncio.create_task(send(channel))
    await hold.reached()
    proxy.pause()
    started = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError):
        await held
    assert time.monotonic() - started < 40.0  # 4 on an idle machine, and 60 with gRPC's own ping timeout
