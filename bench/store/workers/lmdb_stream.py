"""What raw LMDB gives when it is read by another process through gRPC alone: the ceiling of a store that is a server.

With a `path` it serves what raw_lmdb wrote there, about 1 MiB a message, without header or checksum; with a `port` it
reads such a server's blocks into one memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import uvloop

from bench.handoff.conversation import Conversation
from bench.handoff.transfers import allocate
from bench.store.rate import rate_of
from bench.store.workers.raw_lmdb import open_environment
from kvrelay.kv.frame import MESSAGE_BYTES
from kvrelay.rpc import raw
from kvrelay.rpc.channel import cancelling, open_channel
from kvrelay.rpc.process import tune_malloc
from kvrelay.rpc.server import bind, make_server

SERVICE = "bench.LMDB"


def main() -> None:
    driver = Conversation()
    tune_malloc()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(driver) if "path" in driver.task else _read(driver))


async def _serve(driver: Conversation) -> None:
    slab_bytes = driver.task["slab_bytes"]
    env = open_environment(Path(driver.task["path"]))
    with env.begin() as txn, txn.cursor() as cursor:
        keys = list(cursor.iternext(values=False))
    num_in_message = max(1, MESSAGE_BYTES // slab_bytes)

    async def get(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        for start in range(0, len(keys), num_in_message):
            with env.begin(buffers=True) as txn:
                found = [txn.get(key)[:slab_bytes] for key in keys[start : start + num_in_message]]
                message = b"".join(found)
            yield message

    server = make_server()
    server.add_generic_rpc_handlers((raw.raw_methods(SERVICE, unary_stream={"Get": get}),))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    driver.tell(port=port)
    await asyncio.to_thread(driver.next_order)
    await server.stop(None)


async def _read(driver: Conversation) -> None:
    task = driver.task
    memory = memoryview(allocate(task["num_bytes"]))
    async with open_channel(f"127.0.0.1:{task['port']}", own_connection=True) as channel:
        driver.tell(ready=True)
        while order := await asyncio.to_thread(driver.next_order):
            driver.tell(bytes_per_s=await rate_of(lambda: _get(channel, memory), order["seconds"]))


async def _get(channel: grpc.aio.Channel, memory: memoryview) -> int:
    num_bytes = 0
    call = raw.unary_stream(channel, SERVICE, "Get")(b"")
    async with cancelling(call):
        async for message in call:
            memory[num_bytes : num_bytes + len(message)] = message
            num_bytes += len(message)
    if num_bytes != len(memory):
        raise AssertionError(f"{num_bytes} of {len(memory)} bytes came")
    return num_bytes


if __name__ == "__main__":
    main()
