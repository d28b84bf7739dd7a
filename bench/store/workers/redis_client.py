"""Redis over a TCP socket, in its own protocol and without a client library: SET and GET, eight requests under way."""

from __future__ import annotations

import socket
from typing import Any

from bench.store.peer import Blocks, serve

NUM_UNDER_WAY = 8
END = b"\r\n"


class Redis:
    def __init__(self, task: dict[str, Any], blocks: Blocks) -> None:
        self._blocks = blocks
        self._connection = socket.create_connection(("127.0.0.1", task["port"]))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._replies = self._connection.makefile("rb", buffering=2**16)

    def put(self) -> int:
        num_answered = 0
        for index, (key, slab) in enumerate(zip(self._blocks.keys, self._blocks.slabs, strict=True)):
            self._connection.sendall(_words(b"SET", key) + b"$%d\r\n" % len(slab))
            self._connection.sendall(slab)
            self._connection.sendall(END)
            if index - num_answered >= NUM_UNDER_WAY:
                self._expect(b"+OK\r\n")
                num_answered += 1
        for _ in range(len(self._blocks.keys) - num_answered):
            self._expect(b"+OK\r\n")
        return self._blocks.num_bytes

    def get(self) -> int:
        keys = self._blocks.keys
        for key in keys[:NUM_UNDER_WAY]:
            self._connection.sendall(_words(b"GET", key))
        for index, place in enumerate(self._blocks.places):
            self._expect(b"$%d\r\n" % len(place))
            got = 0
            while got < len(place):
                got += self._replies.readinto(place[got:])  # type: ignore[attr-defined]
            if index + NUM_UNDER_WAY < len(keys):
                self._connection.sendall(_words(b"GET", keys[index + NUM_UNDER_WAY]))
            self._expect(END)
        return self._blocks.num_bytes

    def make_cold(self) -> None:
        raise NotImplementedError("it has everything in memory")

    def _expect(self, line: bytes) -> None:
        found = self._replies.readline()
        if found != line:
            raise RuntimeError(f"Redis says {found!r} and not {line!r}")


def _words(name: bytes, key: bytes) -> bytes:
    """The start of a request; a SET's value follows."""
    count = 3 if name == b"SET" else 2
    return b"*%d\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (count, len(name), name, len(key), key)


if __name__ == "__main__":
    serve(Redis)
