"""What users of other servers reported about the sizes of blocks and messages, on real processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from tests.support.answers import ask, wait_until_quiet
from tests.support.cluster import Cluster, running
from tests.support.reference import ReferenceEngine
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_requests import expected, greedy, random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

NUM_NODES = 2  # that compute

SIZES = {  # block tokens: model, and the bytes of a block
    64: ({}, 2 * 2 * 64 * 2 * 16 * 4),
    256: ({"num_heads": 8, "num_kv_heads": 8, "head_dim": 128}, 2 * 2 * 256 * 8 * 128 * 4),  # and a header: > 4 MiB
}


@pytest.mark.parametrize("block_tokens", SIZES)
async def test_prompts_around_large_blocks_and_blocks_beyond_grpcs_default_limit(
    tmp_path: Path, block_tokens: int
) -> None:
    """LMCache#2459: prompts shorter than a block never finished; elasticdl#571: KV messages beyond 4 MiB failed, for
    long prompts only."""
    shape, slab_bytes = SIZES[block_tokens]
    model = make_tiny_model(tmp_path / "model", **shape)
    reference = ReferenceEngine(model)
    args = ["--block-tokens", str(block_tokens)]
    with running(
        Cluster(model, tmp_path, num_blocks=8 * 256 // block_tokens, prefill_args=args, decode_args=args)
    ) as cluster:
        async with AsyncClient(cluster.address) as client:
            assert (await client.get_model()).layout.slab_bytes == slab_bytes
            for num_tokens in (1, 2, 33, block_tokens - 1, block_tokens, block_tokens + 1, 3 * block_tokens, 800):
                prompt_ids = random_prompt(num_tokens, 1500 + num_tokens)
                async with asyncio.timeout(60.0):
                    answer = await ask(client, prompt_ids, greedy(4))
                assert answer.token_ids == expected(reference, prompt_ids, 4), num_tokens
            await wait_until_quiet(client, NUM_NODES)
