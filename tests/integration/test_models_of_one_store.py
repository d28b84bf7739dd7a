"""Clusters of different models and layouts over one store directory, one after another."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from decode_node.app import DecodeApp
from decode_node.config import DecodeConfig
from kvrelay.inference import TokenPrompt
from kvrelay.kv.remote_admin import StoreAdmin
from kvrelay.types import InstanceId
from kvstore.config import KVStoreConfig
from kvstore.main import KVStoreApp
from prefill_node.app import PrefillApp
from prefill_node.config import PrefillConfig
from tests.support.answers import Answer
from tests.support.coordinator_ends import ends
from tests.support.hosting import hosted
from tests.support.reference import ReferenceEngine
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_requests import expected, greedy, random_prompt

TIMEOUT_S = 60.0
PROMPT_IDS = random_prompt(330, 6)
NUM_CACHED = 320  # 20 full blocks of 16
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

Setup = tuple[Path, str, int]  # model, dtype, tokens of a block


async def first_answer(store: Path, setup: Setup) -> Answer:
    """Of nodes that start over what earlier ones stored, and end once the store has their own."""
    model, dtype, block_tokens = setup
    async with asyncio.timeout(TIMEOUT_S), AsyncExitStack() as closing:
        cluster = await closing.enter_async_context(ends(num_prefill=0, num_decode=0))
        config = KVStoreConfig(path=str(store), coordinator=(cluster.address,))
        address = await closing.enter_async_context(
            hosted(KVStoreApp(config, InstanceId("store"), CollectorRegistry()))
        )
        common: Any = {"model": model, "dtype": dtype, "block_tokens": block_tokens, "threads": 1, "num_blocks": 64}
        common |= {"coordinator": (cluster.address,), "kvstore": (address,)}
        # A model as small as this computes faster than it loads.
        prefill = PrefillApp(PrefillConfig(prefix_load="always", **common), InstanceId("prefill"), CollectorRegistry())
        decode = DecodeApp(DecodeConfig(**common), InstanceId("decode"), CollectorRegistry())
        for app in (prefill, decode):
            await closing.enter_async_context(hosted(app))
        await cluster.until_status(lambda status: sum(node.status.ready for node in status.nodes) == 3)
        answer = await cluster.ask(TokenPrompt(PROMPT_IDS), greedy(8))
        async with StoreAdmin(address) as admin:
            while answer.finished.prefix_hash not in {block.block_hash async for block in admin.list()}:
                await asyncio.sleep(0.05)
    return answer


async def test_a_store_that_many_models_used_in_turn_mixes_none_of_their_blocks(tmp_path: Path) -> None:
    """vllm#44250, LMCache#2961, vllm#3264, llm-d-kv-cache#243: a key without what changes the KV found that of another
    model or layout."""
    models = [
        make_tiny_model(tmp_path / "plain"),
        make_tiny_model(tmp_path / "weights", seed=1),
        make_tiny_model(tmp_path / "rope", rope_scaling=LLAMA3_ROPE),
    ]
    references = {model: ReferenceEngine(model) for model in models}
    setups: list[Setup] = [(model, "float32", 16) for model in models]
    setups += [(models[0], "bfloat16", 16), (models[0], "float32", 32)]
    for setup in setups:
        answer = await first_answer(tmp_path / "store", setup)
        assert answer.finished.usage.cached.total == 0, f"{setup} has not been used before"
        if setup[1:] == ("float32", 16):
            assert answer.token_ids == expected(references[setup[0]], PROMPT_IDS, 8)
    answer = await first_answer(tmp_path / "store", setups[0])
    assert answer.finished.usage.cached.disk == NUM_CACHED
    assert answer.token_ids == expected(references[models[0]], PROMPT_IDS, 8)
