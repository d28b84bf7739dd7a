"""The reference tokens again, cold, with other chunk sizes, in bfloat16, and with tails computed on the decode node."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from tests.support import golden
from tests.support.answers import Answer, ask, wait_until_quiet
from tests.support.cluster import Cluster, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

# A bfloat16 step whose reference margin is under this may flip by rounding.
BFLOAT16_NEAR_TIE = 0.3


async def ask_all(cluster: Cluster, cases: tuple[golden.GoldenCase, ...]) -> list[Answer]:
    async with AsyncClient(cluster.address) as client:
        answers = await asyncio.gather(*(ask(client, case.prompt_ids) for case in cases))
        await wait_until_quiet(client, num_nodes=2)
    return list(answers)


@pytest.mark.parametrize("chunk_tokens", [64, 512])
async def test_float32_whatever_the_prefill_chunks(demo_model: Path, tmp_path: Path, chunk_tokens: int) -> None:
    chunks = ["--chunk-tokens", str(chunk_tokens)]
    cases = golden.load(golden.FLOAT32)
    with running(Cluster(demo_model, tmp_path, prefill_args=chunks, with_store=False)) as cluster:
        for case, answer in zip(cases, await ask_all(cluster, cases), strict=True):
            assert answer.token_ids == case.output_ids, case.name


async def test_bfloat16_up_to_near_ties(demo_model: Path, tmp_path: Path) -> None:
    cases = golden.load(golden.BFLOAT16_WEIGHTS)
    with running(Cluster(demo_model, tmp_path, dtype="bfloat16", with_store=False)) as cluster:
        answers = await ask_all(cluster, cases)
    num_compared = 0
    for case, answer in zip(cases, answers, strict=True):
        num_certain = case.num_certain(BFLOAT16_NEAR_TIE)
        assert answer.token_ids[:num_certain] == case.output_ids[:num_certain], case.name
        num_compared += num_certain
    assert num_compared >= 100


async def test_a_cached_prompt_needs_no_prefill_node(demo_model: Path, tmp_path: Path) -> None:
    cases = golden.load(golden.FLOAT32)
    with running(Cluster(demo_model, tmp_path, coordinator_args=["--placement", "load"])) as cluster:
        for case in cases[2:4]:
            async with AsyncClient(cluster.address) as client:
                prompt_ids = (*case.prompt_ids, *case.output_ids[:32])
                cold = await ask(client, prompt_ids)
                warm = await ask(client, prompt_ids)
            assert cold.token_ids[:32] == warm.token_ids[:32] == case.output_ids[32:], case.name
            assert cold.finished.prefill_node == cluster.prefill[0].address
            assert (warm.finished.prefill_node, warm.finished.handoff_bytes) == ("", 0)
            assert warm.finished.usage.cached.device == (len(prompt_ids) - 1) // 16 * 16
