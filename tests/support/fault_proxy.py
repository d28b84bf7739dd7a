"""A TCP relay in front of one server that can spoil the link: pause, cut, slow it down, corrupt it, or stop a KV stream
at a stage.

It runs in a thread with its own event loop, so that sync and async tests drive it alike: every method returns when the
fault is in force. With `pid` a fault concerns the connections of that process (and its descendants) alone: a node
tells everybody one address, and so the link from one peer to it is told apart from the link from another.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from kvrelay.kv.frame import FrameKind
from tests.support.kv_frames_in_http2 import PartStart
from tests.support.link_faults import Direction, Hold, LinkFault, Pace
from tests.support.relayed_connection import Connection, reset
from tests.support.socket_owner import socket_inode

CALL_TIMEOUT_S = 60.0
BUFFER_BYTES = 65_536  # of the sockets: what a slow link would not hold either

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Flip:
    direction: Direction
    kind: int | None  # of the KV frame whose payload it hits; None: any byte
    pid: int | None


class FaultProxy:
    """Relays 127.0.0.1:`port` to 127.0.0.1:`upstream_port`, between `start` and `close`; also a context manager.

    `frames=False` relays bytes that are not plain HTTP/2 (TLS); then there is nothing to hold, and no KV payload.
    """

    def __init__(self, upstream_port: int, *, port: int = 0, frames: bool = True) -> None:
        self.upstream_port = upstream_port
        self.num_kv_frames: Counter[tuple[Direction, int]] = Counter()  # seen so far, by direction and kind
        self._frames = frames
        self._listener = _listen(port)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._note_error)
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-{self.port}", daemon=True)
        self._links: dict[int | None, LinkFault] = {}
        self._holds: list[Hold] = []
        self._flips: list[_Flip] = []
        self._connections: set[Connection] = set()
        self._releases: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._errors: list[BaseException] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> FaultProxy:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(CALL_TIMEOUT_S)

    def close(self) -> None:
        """Resets what is open. Raises what went wrong inside the proxy, which is a fault of the proxy's own."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CALL_TIMEOUT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CALL_TIMEOUT_S)
        self._loop.close()
        self._listener.close()
        if self._errors:
            raise ExceptionGroup("the proxy failed", [e for e in self._errors if isinstance(e, Exception)])

    # Faults

    def pause(self, pid: int | None = None) -> None:
        """A black hole: connections stay open, new ones are accepted, no byte passes either way."""
        self._call(lambda: self._link(pid).flows.clear())

    def resume(self, pid: int | None = None) -> None:
        """Ends a pause; what was held passes now."""
        self._call(lambda: self._link(pid).flows.set())

    def cut(self, pid: int | None = None) -> None:
        """Resets every connection, and each new one."""
        self._call(lambda: self._cut(pid))

    def reset(self, pid: int | None = None) -> None:
        """Resets every connection once; new ones pass."""
        self._call(lambda: self._reset(pid))

    def throttle(self, bytes_per_s: float, pid: int | None = None) -> None:
        """Lets so many bytes a second through in each direction, over all connections together."""
        self._call(lambda: self._link(pid).paces.update({way: Pace(bytes_per_s) for way in Direction}))

    def corrupt(
        self,
        kind: int = FrameKind.BLOCK,
        *,
        direction: Direction = Direction.TO_SERVER,
        pid: int | None = None,
        num_frames: int = 1,
    ) -> None:
        """Flips a bit of the payload of the next KV frames of `kind`. A store's replies to Get are TO_CLIENT."""
        self._call(lambda: self._flips.extend([_Flip(direction, kind, pid)] * num_frames))

    def corrupt_raw(self, *, direction: Direction = Direction.TO_SERVER, pid: int | None = None) -> None:
        """Flips a bit of whatever passes next, HTTP/2's own bytes included."""
        self._call(lambda: self._flips.append(_Flip(direction, None, pid)))

    def hold(self, kind: int, nth: int = 1, *, pid: int | None = None) -> Hold:
        """Arms a stop before the `nth` KV frame of `kind` that a client sends from now on. One hold stops one stream,
        and a frame counts for one hold only: the first armed one that it matches and that was not reached."""
        what = f"a KV frame of kind {kind}"
        return self._arm(
            Hold(what, lambda message: message.kv_kind == kind, nth, pid, Direction.TO_SERVER, self._release)
        )

    def hold_reply(self, matches: Callable[[bytes], bool], *, pid: int | None = None) -> Hold:
        """Arms a stop before the next message to a client whose first bytes (up to HEAD_BYTES) match. The messages that
        follow it on the connection wait as well; pings are answered."""
        return self._arm(
            Hold("such a reply", lambda message: matches(message.head), 1, pid, Direction.TO_CLIENT, self._release)
        )

    def heal(self) -> None:
        """No fault from here on: held streams go on, corruption that has not happened does not."""
        for hold in self._call(self._clear):
            hold.release()

    # What connections ask; in the proxy's thread, as is all that follows

    def links(self, connection: Connection) -> Iterable[LinkFault]:
        return [link for pid, link in self._links.items() if pid is None or connection.belongs_to(pid)]

    def catch(self, connection: Connection, direction: Direction, message: PartStart) -> Hold | None:
        if message.kv_kind is not None:
            self.num_kv_frames[direction, message.kv_kind] += 1
        for hold in self._holds:
            if (
                hold.direction is direction
                and hold.concerns(message)
                and (hold.pid is None or connection.belongs_to(hold.pid))
            ):
                return hold if hold.catches() else None
        return None

    def take_flip(self, connection: Connection, direction: Direction, kind: int | None) -> bool:
        for flip in self._flips:
            if (flip.direction, flip.kind) == (direction, kind) and (
                flip.pid is None or connection.belongs_to(flip.pid)
            ):
                self._flips.remove(flip)
                return True
        return False

    def _arm(self, hold: Hold) -> Hold:
        self._call(lambda: self._holds.append(hold))
        return hold

    def _call(self, change: Callable[[], R]) -> R:
        async def run() -> R:
            return change()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(CALL_TIMEOUT_S)

    def _link(self, pid: int | None) -> LinkFault:
        return self._links.setdefault(pid, LinkFault())

    def _cut(self, pid: int | None) -> None:
        self._link(pid).is_cut = True
        self._reset(pid)

    def _reset(self, pid: int | None) -> None:
        for connection in list(self._connections):
            if pid is None or connection.belongs_to(pid):
                connection.reset()

    def _clear(self) -> list[Hold]:
        for link in self._links.values():
            link.flows.set()
        self._links.clear()
        self._flips.clear()
        return list(self._holds)

    def _release(self, hold: Hold) -> None:
        self._call(lambda: self._release_now(hold))

    def _release_now(self, hold: Hold) -> None:
        if hold in self._holds:
            self._holds.remove(hold)
        for connection in self._connections:
            for task in connection.release(hold):
                self._releases.add(task)
                task.add_done_callback(self._releases.discard)

    async def _serve(self) -> None:
        self._server = await asyncio.start_server(self._accept, sock=self._listener)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._relay(reader, writer)
        except asyncio.CancelledError:
            pass  # reset, by a fault or at the end
        finally:
            reset(writer)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        if peer is None:  # it is gone already
            return
        inode = socket_inode(peer[1], self.port)
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self.upstream_port)
        except OSError:
            return
        connection = Connection(self, (reader, writer), upstream, inode, frames=self._frames)
        self._connections.add(connection)
        try:
            if not any(link.is_cut for link in self.links(connection)):
                await connection.run()
        except BaseExceptionGroup as group:
            self._errors.append(group)
        finally:
            self._connections.discard(connection)
            reset(upstream[1])

    def _note_error(self, _: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Told by `close`. asyncio itself would only log it, in this thread and in the middle of a test."""
        error = context.get("exception")
        self._errors.append(error if isinstance(error, BaseException) else RuntimeError(str(context["message"])))

    async def _end(self) -> None:
        """Everything that runs in this loop, connections that are only being accepted too."""
        if self._server is not None:
            self._server.close()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.sleep(0)  # what has not begun could not catch its end
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # for transports to close


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener
