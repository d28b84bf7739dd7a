"""A Redis server of a test's own, on loopback, without a file."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from tests.support.cluster import free_port

START_TIMEOUT_S = 60.0


@asynccontextmanager
async def redis_server(port: int = 0) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Its address as a node is told it, and the process. Skips the test where there is no redis-server."""
    pytest.importorskip("redis", reason="the Redis client is not installed: pip install 'kvrelay[redis]'")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    port = port or free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await _answers(port):
                await asyncio.sleep(0.02)  # it has no other way to say that it listens
        yield f"redis://127.0.0.1:{port}", process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _answers(port: int) -> bool:
    with suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        return True
    return False
