"""How often a handoff copies a byte in user space: counted between two processes of the product's own classes."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "support/copies/count.c"
COMPILER = shutil.which("gcc") or shutil.which("cc")
TIMEOUT_S = 180.0  # of two processes that import torch, on a machine that does much else

pytestmark = pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs a C compiler on Linux")


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("copies") / "count.so"
    command = [str(COMPILER), "-O1", "-fno-builtin", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    return library


async def start(counter: Path, *arguments: str) -> Process:
    command = (sys.executable, "-m", "tests.support.copies.ends", *arguments)
    return await asyncio.create_subprocess_exec(
        *command, env=os.environ | {"LD_PRELOAD": str(counter)}, stdin=PIPE, stdout=PIPE
    )


async def line(process: Process) -> list[str]:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().split()


async def count(receiver: Process) -> int:
    assert receiver.stdin is not None
    receiver.stdin.write(b"\n")
    return int((await line(receiver))[0])


@pytest.mark.parametrize(("slab", "num_slab_bytes"), [("360KiB", 120 * 368_640), ("2MiB", 21 * 2_097_152)])
async def test_a_byte_is_copied_twice_by_the_sender_and_three_times_by_the_receiver(
    counter: Path, slab: str, num_slab_bytes: int
) -> None:
    """Sender: into the message, and by gRPC into its slice. Receiver: twice by gRPC, and into the pool. Slabs that are
    sent in parts are no exception."""
    async with asyncio.timeout(TIMEOUT_S):
        receiver = await start(counter, "receive", slab)
        try:
            (address,) = await line(receiver)
            before = await count(receiver)
            sender = await start(counter, "send", slab, address)
            num_bytes, num_sent = map(int, await line(sender))
            num_received = await count(receiver) - before
            assert await sender.wait() == 0
        finally:
            receiver.kill()
            await receiver.wait()
    assert num_bytes == num_slab_bytes
    assert 1.95 < num_sent / num_bytes < 2.05
    assert 2.95 < num_received / num_bytes < 3.05
