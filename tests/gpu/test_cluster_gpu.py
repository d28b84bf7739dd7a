"""A whole cluster whose prefill and decode node compute on the GPU: slabs leave it, travel, and arrive on it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvrelay.client import AsyncClient
from tests.support import golden
from tests.support.answers import ask, wait_until_quiet
from tests.support.cluster import Cluster, running
from tests.support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU

ON_GPU = ["--device", "cuda"]


async def test_reference_tokens_after_a_handoff_and_from_every_cache(demo_model: Path, tmp_path: Path) -> None:
    cases = golden.load(golden.FLOAT32)[:8]
    cluster = Cluster(
        demo_model,
        tmp_path,
        coordinator_args=["--local-tail-tokens", "0"],  # so that every answer is handed over
        prefill_args=ON_GPU,
        decode_args=ON_GPU,
        fresh=True,
    )
    with running(cluster):
        async with AsyncClient(cluster.address) as client:
            for _ in range(2):  # cold, then from the nodes' pools
                answers = await asyncio.gather(*(ask(client, case.prompt_ids) for case in cases))
                for case, answer in zip(cases, answers, strict=True):
                    certain = case.num_certain(0.001)
                    assert answer.token_ids[:certain] == case.output_ids[:certain], case.name
                await wait_until_quiet(client, num_nodes=2)
        assert "recorded decode steps of up to 64 rows" in cluster.decode[0].log()
        assert "torch-plain" not in cluster.prefill[0].log()
