"""The kvstore as a process: what survives SIGTERM and kill -9, and what a second one says."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from kvrelay.kv.layout import KVLayout
from kvrelay.kv.remote import StoreClient
from kvrelay.types import Tier
from tests.support.store_blocks import hash_of, slab_of

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32")
COMMAND = "import sys; from kvstore.main import main; sys.exit(main(sys.argv[1:]))"
BLOCKS = [(hash_of(number), slab_of(number, LAYOUT.slab_bytes)) for number in range(20)]


async def spawn(path: Path) -> asyncio.subprocess.Process:
    arguments = (sys.executable, "-c", COMMAND, "--path", str(path), "--disk-bytes", "8MiB")
    return await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@asynccontextmanager
async def running(path: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, StoreClient]]:
    process = await spawn(path)
    try:
        assert process.stdout is not None
        ready, role, address = (await process.stdout.readline()).decode().split()
        assert (ready, role) == ("READY", "kvstore")
        client = StoreClient(address, LAYOUT, "ab" * 32)
        try:
            yield process, client
        finally:
            await client.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def held(client: StoreClient) -> list[Tier]:
    tiers = []
    async with aclosing(client.get([block_hash for block_hash, _ in BLOCKS])) as found:
        async for block_hash, slab, tier in found:
            assert (block_hash, bytes(slab)) == BLOCKS[len(tiers)]
            tiers.append(tier)
    return tiers


async def test_sigterm_writes_what_was_accepted_and_exits_0(tmp_path: Path) -> None:
    async with running(tmp_path) as (process, client):
        assert await client.put(BLOCKS) == len(BLOCKS)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    async with running(tmp_path) as (_, client):
        assert await held(client) == [Tier.DISK] * len(BLOCKS)


async def test_kill_9_loses_nothing_that_was_written(tmp_path: Path) -> None:
    async with running(tmp_path) as (process, client):
        await client.put(BLOCKS)
        process.send_signal(signal.SIGTERM)
        await process.wait()
    async with running(tmp_path) as (process, client):
        assert len(await held(client)) == len(BLOCKS)
        process.kill()
        await process.wait()
    async with running(tmp_path) as (_, client):
        assert await held(client) == [Tier.DISK] * len(BLOCKS)


async def test_kill_9_in_the_middle_of_writing_leaves_only_right_blocks(tmp_path: Path) -> None:
    for _ in range(3):
        async with running(tmp_path) as (process, client):
            assert await client.match([block_hash for block_hash, _ in BLOCKS]) == await held(client)
            putting = asyncio.create_task(client.put(BLOCKS))
            while await client.missing([BLOCKS[5][0]]):
                pass
            process.kill()
            await putting


async def test_a_second_process_on_the_same_path_says_so_in_one_line(tmp_path: Path) -> None:
    async with running(tmp_path) as (first, client):
        second = await spawn(tmp_path)
        _, errors = await second.communicate()
        assert second.returncode == 2
        assert errors.decode() == (
            f"kvrelay kvstore: kvstore path {tmp_path} is in use by another process (pid {first.pid}); "
            "stop it or choose another path\n"
        )
        assert await client.put(BLOCKS) == len(BLOCKS)


async def test_memory_that_no_machine_has_is_refused_in_one_line(tmp_path: Path) -> None:
    arguments = (sys.executable, "-c", COMMAND, "--path", str(tmp_path), "--memory-bytes", "100000TiB")
    process = await asyncio.create_subprocess_exec(*arguments, stderr=subprocess.PIPE)
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert errors.decode() == (
        f"kvrelay kvstore: kvstore memory_bytes {100_000 << 40}: Cannot allocate memory; take less\n"
    )


async def test_it_runs_without_torch(tmp_path: Path) -> None:
    code = f"import sys; sys.modules['torch'] = None; {COMMAND}"
    arguments = (sys.executable, "-c", code, "--help")
    process = await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE, env=dict(os.environ))
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert b"--memory-bytes" in output
