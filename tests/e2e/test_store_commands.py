"""`kvrelay store` on a real cluster: what is warmed is found after every node restarted, and what is evicted is not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from kvrelay import store_command
from kvrelay.client import AsyncClient
from kvrelay.inference import TextPrompt
from tests.support.answers import collect, wait_until_quiet
from tests.support.cluster import Cluster, running
from tests.support.soak import TIMEOUT_S
from tests.support.tiny_requests import greedy

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(TIMEOUT_S)]

SYSTEM_TEXT = "You answer questions about the weather, and about nothing else. " * 5  # 320 bytes, and as many tokens


async def test_what_is_warmed_outlives_the_nodes_and_what_is_evicted_does_not(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def command(*argv: str) -> str:
        assert await asyncio.to_thread(store_command.main, [*argv, "--address", cluster.address]) == 0
        return str(capsys.readouterr().out)

    async def cached(cluster: Cluster) -> int:
        async with AsyncClient(cluster.address) as client:
            await wait_until_quiet(client, 2)
            answer = await collect(client.generate(TextPrompt(SYSTEM_TEXT + "Will it rain?"), greedy(4)))
        return answer.finished.usage.cached.total

    def restart_nodes() -> None:
        nodes = (*cluster.prefill, *cluster.decode)
        for node in nodes:
            node.stop()
        for node in nodes:
            node.start()
        for node in nodes:
            node.wait_ready()

    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"text": SYSTEM_TEXT}) + "\n")
    with running(Cluster(model, tmp_path, prefill_args=["--prefix-load", "always"])) as cluster:
        [warmed] = json.loads(await command("warm", str(file), "--json"))["prompts"]
        assert (warmed["prompt_tokens"], warmed["is_stored"], warmed["error"]) == (320, True, "")
        restart_nodes()
        assert await cached(cluster) == 320
        pinned = await command("pin", "--prefix", warmed["prefix_hash"], "--for", "5m")
        assert "pinned for 5m" in pinned
        [stats] = json.loads(await command("stats", "--json"))["stores"]
        assert stats["num_pinned"] > 0
        assert f"{warmed['prefix_hash'][:16]}" in await command("ls", "--blocks", "--limit", "0")
        assert "0 corrupt" in await command("verify")
        assert "smaller" in await command("compact")
        [evicted] = json.loads(await command("evict", "--tenant", "default", "--json"))["stores"]
        assert evicted["num_blocks"] >= 20
        restart_nodes()
        assert await cached(cluster) == 0
