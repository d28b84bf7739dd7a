"""One client's connection through a fault proxy: two pumps, each with the faults of its links."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from tests.support.kv_frames_in_http2 import (
    DATA,
    END_STREAM,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Http2Frame,
    Http2Reader,
    PartStart,
    ScanState,
    scan,
)
from tests.support.link_faults import Direction, Hold, LinkFault, Pace
from tests.support.socket_owner import owns_socket

READ_BYTES = 65_536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 s


class Faults(Protocol):
    """What the proxy tells its connections."""

    def links(self, connection: Connection) -> Iterable[LinkFault]:
        """Those that apply to the connection now."""

    def catch(self, connection: Connection, direction: Direction, message: PartStart) -> Hold | None:
        """Asked once for each message: the hold that it is not to pass, if any."""

    def take_flip(self, connection: Connection, direction: Direction, kind: int | None) -> bool:
        """Whether a bit of this KV frame's payload (None: of this piece of bytes) is to be flipped; once for each."""


@dataclass(slots=True)
class _Stream:
    """One direction of one HTTP/2 stream."""

    state: ScanState = field(default_factory=ScanState)
    hold: Hold | None = None
    held: list[Http2Frame] = field(default_factory=list)
    is_counted: bool = False  # the next message was held before; it is not asked about again
    flip_in: int | None = None  # bytes from here to the one that is to be flipped


class Connection:
    def __init__(
        self,
        faults: Faults,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        inode: int | None,
        *,
        frames: bool,
    ) -> None:
        self._writers = (client[1], server[1])
        self._inode = inode
        self._owned: dict[int, bool] = {}
        self._pumps = {
            Direction.TO_SERVER: Pump(self, faults, client[0], server[1], Direction.TO_SERVER, frames=frames),
            Direction.TO_CLIENT: Pump(self, faults, server[0], client[1], Direction.TO_CLIENT, frames=frames),
        }
        self._task: asyncio.Task[None] | None = None

    def belongs_to(self, pid: int) -> bool:
        """Whether the client is that process or a descendant of it. This process, whose descendants may be anything,
        stands for itself alone."""
        if pid not in self._owned:
            self._owned[pid] = self._inode is not None and owns_socket(pid, self._inode, alone=pid == os.getpid())
        return self._owned[pid]

    async def run(self) -> None:
        """Until both sides are at their end, or either breaks or is reset."""
        self._task = asyncio.current_task()
        try:
            async with asyncio.TaskGroup() as both:
                for pump in self._pumps.values():
                    both.create_task(pump.run())
        except* (ConnectionError, TimeoutError):
            pass
        finally:
            for writer in self._writers:
                reset(writer)

    def reset(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def release(self, hold: Hold) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(pump.release(hold)) for pump in self._pumps.values()]


class Pump:
    """One direction. Whole HTTP/2 frames leave, under a lock, so that held ones may be sent later between others."""

    def __init__(
        self,
        connection: Connection,
        faults: Faults,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        direction: Direction,
        *,
        frames: bool,
    ) -> None:
        self._connection = connection
        self._faults = faults
        self._reader = reader
        self._writer = writer
        self._direction = direction
        self._http2 = Http2Reader(from_client=direction is Direction.TO_SERVER) if frames else None
        self._streams: dict[int, _Stream] = {}
        # Of a server's direction: what comes after a message that is held, of every stream. One stream's HEADERS cannot
        # wait while another's pass, since HPACK compresses each by those before it.
        self._stop: Hold | None = None
        self._waiting: list[Http2Frame] = []
        self._sending = asyncio.Lock()

    async def run(self) -> None:
        while data := await self._reader.read(READ_BYTES):
            async with self._sending:
                await self._pass(data)
        await self._flow()
        with suppress(OSError):
            self._writer.write_eof()

    async def release(self, hold: Hold) -> None:
        with suppress(ConnectionError):
            async with self._sending:
                if self._stop is hold:
                    waiting, self._waiting, self._stop = self._waiting, [], None
                    for frame in waiting:
                        await self._send(self._take(frame))
                for stream in [stream for stream in self._streams.values() if stream.hold is hold]:
                    held, stream.held, stream.hold = stream.held, [], None
                    stream.is_counted = True
                    for frame in held:
                        await self._send(self._take(frame))

    async def _pass(self, data: bytes) -> None:
        if self._http2 is None:
            await self._send(data)
            return
        prefix, frames = self._http2.feed(data)
        await self._send(prefix)
        for frame in frames:
            await self._send(self._take(frame))

    def _take(self, frame: Http2Frame) -> bytes:
        """What of the frame may leave now; the rest is held."""
        if self._stop is not None and frame.kind not in (SETTINGS, PING, WINDOW_UPDATE):
            self._waiting.append(frame)
            return b""
        if frame.kind == RST_STREAM and (over := self._streams.pop(frame.stream_id, None)):
            # What was held follows, too late to be used: bytes that vanished would never be credited to the
            # connection's flow control window.
            return b"".join(each.encode() for each in (frame, *over.held))
        if frame.kind != DATA:  # a client sends no HEADERS after DATA, so nothing else is to wait its turn
            return frame.encode()
        stream = self._streams.setdefault(frame.stream_id, _Stream())
        if stream.hold is not None:
            stream.held.append(frame)
            return b""
        taken = self._take_data(frame, stream)
        if frame.flags & END_STREAM and stream.hold is None:
            self._streams.pop(frame.stream_id, None)
        return taken

    def _take_data(self, frame: Http2Frame, stream: _Stream) -> bytes:
        payload, passing = bytearray(frame.payload), len(frame.payload)
        starts, after = scan(stream.state, frame.payload)
        if stream.flip_in is not None:
            self._flip(stream, payload, stream.flip_in)
        for start in starts:
            hold = None if stream.is_counted else self._faults.catch(self._connection, self._direction, start)
            stream.is_counted = False
            if hold is not None:
                after, passing = start.before, start.cut
                break
            kind = start.kv_kind
            if kind is not None and self._faults.take_flip(self._connection, self._direction, kind):
                self._flip(stream, payload, start.kv_payload_offset)
        else:
            hold = None
        stream.state = after
        whole = Http2Frame(frame.kind, frame.flags, frame.stream_id, bytes(payload))
        if hold is None:
            return whole.encode()
        first, rest = whole.split(passing)
        self._begin_hold(hold, stream, rest)
        return first.encode() if first.payload else b""

    def _begin_hold(self, hold: Hold, stream: _Stream, rest: Http2Frame) -> None:
        if self._direction is Direction.TO_SERVER:
            stream.hold = hold
            stream.held.append(rest)
        else:
            stream.is_counted = True
            self._stop = hold
            self._waiting.append(rest)

    @staticmethod
    def _flip(stream: _Stream, payload: bytearray, at: int) -> None:
        """Flips a bit of the byte `at`, now or in a later frame of the stream."""
        stream.flip_in = at - len(payload)
        if at < len(payload):
            payload[at] ^= 1
            stream.flip_in = None

    async def _send(self, data: bytes) -> None:
        """In pieces that a slow link passes evenly."""
        at = 0
        while at < len(data):
            await self._flow()
            paces = [link.paces[self._direction] for link in self._links() if link.paces]
            piece = data[at : at + _piece_bytes(paces)]
            at += len(piece)
            if paces:
                now = asyncio.get_running_loop().time()
                await asyncio.sleep(max(pace.arrival(len(piece), now) for pace in paces) - now)
            if self._faults.take_flip(self._connection, self._direction, None):
                middle = len(piece) // 2
                piece = piece[:middle] + bytes((piece[middle] ^ 1,)) + piece[middle + 1 :]
            self._writer.write(piece)
            await self._writer.drain()

    async def _flow(self) -> None:
        """Waits for as long as any link is paused."""
        while waits := [link.flows for link in self._links() if not link.flows.is_set()]:
            await waits[0].wait()

    def _links(self) -> Iterable[LinkFault]:
        return self._faults.links(self._connection)


def reset(writer: asyncio.StreamWriter) -> None:
    """Closes with RST: nothing that was written before is delivered for certain."""
    raw: socket.socket | None = writer.get_extra_info("socket")
    if raw is not None:
        with suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()


def _piece_bytes(paces: list[Pace]) -> int:
    return max(512, int(min(pace.bytes_per_s for pace in paces) / 50)) if paces else READ_BYTES
