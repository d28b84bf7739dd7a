"""A coordinator with fake nodes over real gRPC: what a client sees when all goes well, and when something does not."""

from __future__ import annotations

from kvrelay.types import CachedTokens, FinishReason
from tests.support.coordinator_ends import ends
from tests.support.fake_nodes import ANSWER_IDS, ANSWER_TEXT


async def test_whole_path() -> None:
    async with ends() as cluster:
        cluster.prefill[0].cached = CachedTokens(device=16, memory=32)
        outcome = await cluster.ask()
        assert outcome.text == ANSWER_TEXT
        assert outcome.token_ids == ANSWER_IDS
        finished = outcome.finished
        assert finished.reason is FinishReason.STOP
        assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (100, 45)
        assert finished.usage.cached == CachedTokens(device=16, memory=32)
        assert finished.prefill_node == cluster.prefill[0].address
        assert finished.decode_node == cluster.decode[0].address
        assert (finished.handoff_bytes, finished.retries) == (4096, 0)
        assert finished.timing.prefill_s == 0.5
        assert 0 < finished.timing.first_token_s <= finished.timing.total_s
