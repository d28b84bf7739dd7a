"""The limit: 1 MiB at a time from one process's memory to another's over a blocking TCP socket. No checksums."""

from __future__ import annotations

import socket

from bench.handoff.conversation import Conversation
from bench.handoff.transfers import allocate, measure

CHUNK_BYTES = 2**20
DONE = b"!"


def main() -> None:
    driver = Conversation()
    num_bytes = driver.task["num_bytes"]
    memory = memoryview(allocate(num_bytes))
    chunks = [memory[start : start + CHUNK_BYTES] for start in range(0, num_bytes, CHUNK_BYTES)]
    (_send if "port" in driver.task else _receive)(driver, chunks)


def _receive(driver: Conversation, chunks: list[memoryview]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        driver.tell(port=server.getsockname()[1])
        connection, _ = server.accept()
    with connection:
        while _fill(connection, chunks):
            connection.sendall(DONE)


def _fill(connection: socket.socket, chunks: list[memoryview]) -> bool:
    for chunk in chunks:
        got = 0
        while got < len(chunk):
            size = connection.recv_into(chunk[got:])
            if not size:
                return False
            got += size
    return True


def _send(driver: Conversation, chunks: list[memoryview]) -> None:
    with socket.create_connection(("127.0.0.1", driver.task["port"])) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def transfer() -> int:
            for chunk in chunks:
                connection.sendall(chunk)
            if connection.recv(1) != DONE:
                raise ConnectionError("the receiver went away")
            return sum(map(len, chunks))

        driver.tell(ready=True)
        while order := driver.next_order():
            driver.tell(**measure(transfer, driver.task["peer_pid"], order["seconds"]))


if __name__ == "__main__":
    main()
