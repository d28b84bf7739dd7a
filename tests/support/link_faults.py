"""What may be wrong with a link, and where a KV stream is to stop. Belongs to the proxy's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from tests.support.kv_frames_in_http2 import PartStart


class Direction(Enum):
    TO_SERVER = auto()
    TO_CLIENT = auto()


class Pace:
    """Lets so many bytes a second through; all connections of a link share it."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def arrival(self, num_bytes: int, now: float) -> float:
        """When the last of the bytes are over."""
        self._free_at = max(now, self._free_at) + num_bytes / self.bytes_per_s
        return self._free_at


@dataclass(slots=True)
class LinkFault:
    """Of all clients of a proxy, or of one process."""

    is_cut: bool = False
    flows: asyncio.Event = field(default_factory=asyncio.Event)
    paces: dict[Direction, Pace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.flows.set()


class Hold:
    """Stops before the `nth` message that `matches`, counted from now on. Of a client's messages only that stream is
    stopped; of a server's, the whole direction of the connection.

    Wait for it from a test's thread (`wait`) or its event loop (`reached`).
    """

    def __init__(
        self,
        what: str,
        matches: Callable[[PartStart], bool],
        nth: int,
        pid: int | None,
        direction: Direction,
        release: Callable[[Hold], None],
    ) -> None:
        self.what = what
        self.pid = pid
        self.direction = direction
        self._matches = matches
        self._num_left = nth
        self._release = release
        self._reached = threading.Event()

    @property
    def is_reached(self) -> bool:
        return self._reached.is_set()

    def wait(self, timeout_s: float = 60.0) -> None:
        if not self._reached.wait(timeout_s):
            raise TimeoutError(f"no stream came to {self.what} within {timeout_s:g} s")

    async def reached(self, timeout_s: float = 60.0) -> None:
        await asyncio.to_thread(self.wait, timeout_s)

    def release(self) -> None:
        """Lets the stream go on, or forgets a stage that was not reached."""
        self._release(self)

    def concerns(self, message: PartStart) -> bool:
        return not self.is_reached and self._matches(message)

    def catches(self) -> bool:
        """Counts a message that it concerns; True for the one that is not to pass."""
        self._num_left -= 1
        if self._num_left == 0:
            self._reached.set()
        return self._num_left == 0
