"""The reference tokens again, cold, with other chunk sizes, in bfloat16, and with tails computed on the decode node."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from tests.support import golden
from tests.support.answers import GREEDY_64, Answer, ask, wait_until_quiet
from tests.support.cluster import Cluster, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

# A bfloat16 step whose reference margin is under this may flip by rounding.
BFLOAT16_NEAR_TIE = 0.3


CONTINUED = replace(GREEDY_64, max_tokens=32)  # a reference answer from its middle on


async def ask_all(cluster: Cluster, cases: Sequence[golden.GoldenCase]) -> list[Answer]:
    async with AsyncClient(cluster.address) as client:
        answers = await asyncio.gather(*(ask(client, case.prompt_ids) for case in cases))
        await wait_until_quiet(client, num_nodes=2)
    return list(answers)


async def test_float32_in_small_prefill_chunks(demo_model: Path, tmp_path: Path) -> None:
    """Two prompts of several chunks beside two of one. Chunks of the usual size are those of test_golden_float32.py."""
    chunks = ["--chunk-tokens", "64"]
    cases = sorted(golden.load(golden.FLOAT32), key=lambda case: len(case.prompt_ids))[-4:]
    assert [len(case.prompt_ids) > 64 for case in cases] == [False, False, True, True]
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
                cold = await ask(client, prompt_ids, CONTINUED)
                warm = await ask(client, prompt_ids, CONTINUED)
            assert cold.token_ids == warm.token_ids == case.output_ids[32:], case.name
            assert cold.finished.prefill_node == cluster.prefill[0].address
            assert (warm.finished.prefill_node, warm.finished.handoff_bytes) == ("", 0)
            assert warm.finished.usage.cached.device == (len(prompt_ids) - 1) // 16 * 16
