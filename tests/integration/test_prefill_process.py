"""The prefill node as a process: it serves, shows its metrics, drains on SIGTERM, and says why it cannot start."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from kvrelay.messages import NodeRequest, PrefillFinished
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.nodes import PrefillClient
from kvrelay.sampling import SamplingParams
from kvrelay.types import RequestId
from tests.support.tiny_model import make_tiny_model

COMMAND = "import sys; from prefill_node.main import main; sys.exit(main(sys.argv[1:]))"


async def spawn(model: Path, *flags: str) -> asyncio.subprocess.Process:
    arguments = (sys.executable, "-c", COMMAND, "--model", str(model), "--threads", "1", *flags)
    return await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


async def metrics_url(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    async for line in process.stderr:
        if found := re.search(r"metrics on (http://\S+)", line.decode()):
            return found[1]
    raise AssertionError("no metrics address was logged")


async def test_it_serves_counts_and_drains(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    process = await spawn(model, "--num-blocks", "8", "--metrics-port", "0")
    try:
        url = await metrics_url(process)
        assert process.stdout is not None
        ready, role, address = (await process.stdout.readline()).decode().split()
        assert (ready, role) == ("READY", "prefill-node")
        request = NodeRequest(RequestId("r"), tuple(range(3, 43)), 40, SamplingParams(seed=0, max_tokens=1))
        async with open_channel(address) as channel:
            for _ in range(2):
                async with PrefillClient(channel).prefill(request, None, timeout_s=30.0) as events:
                    assert isinstance([event async for event in events][-1], PrefillFinished)
        scraped = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
        assert "kvrelay_prefill_tokens_computed_total 48.0" in scraped
        assert 'kvrelay_prefill_tokens_cached_total{tier="device"} 32.0' in scraped
        blocks = re.findall(r'kvrelay_kv_blocks\{state="\w+"\} (\S+)', scraped)
        assert sum(map(float, blocks)) == 8
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_model_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    process = await spawn(tmp_path / "nothing")
    _, stderr = await process.communicate()
    assert process.returncode == 1
    last_line = stderr.decode().strip().splitlines()[-1]
    assert last_line.startswith("kvrelay prefill-node: ")
    assert str(tmp_path / "nothing") in last_line
