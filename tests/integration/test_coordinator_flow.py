"""A coordinator with fake nodes over real gRPC: what a client sees when all goes well."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.inference import RequestAccepted, TokenPrompt, TokensGenerated, Usage
from kvrelay.sampling import SamplingParams
from kvrelay.types import CachedTokens, FinishReason
from tests.support.coordinator_ends import ends, greedy, long_prompt
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


async def test_short_tail_is_computed_by_the_decode_node() -> None:
    async with ends() as cluster:
        cluster.decode[0].num_cached_blocks = 6  # 96 of 100 tokens
        outcome = await cluster.ask()
        assert outcome.token_ids == ANSWER_IDS
        assert outcome.finished.usage.cached == CachedTokens(device=96)
        assert (outcome.finished.prefill_node, outcome.finished.handoff_bytes) == ("", 0)
        assert outcome.finished.timing.prefill_s == 0.25
        assert cluster.prefill[0].requests == []


async def test_wholly_cached_prompt_needs_no_prefill_node_even_when_all_are_busy() -> None:
    async with ends() as cluster:
        await cluster.ask()  # so that the coordinator expects the prefix there
        cluster.prefill[0].num_slots_free = 0
        cluster.prefill[0].tell()
        cluster.decode[0].num_cached_blocks = 6
        await cluster.ask()
        assert len(cluster.prefill[0].requests) == 1


async def test_one_token_needs_no_reservation() -> None:
    async with ends() as cluster:
        outcome = await cluster.ask(sampling=greedy(max_tokens=1))
        assert outcome.token_ids == ANSWER_IDS[:1]
        assert outcome.text == "T"
        assert outcome.finished.reason is FinishReason.LENGTH
        assert outcome.finished.decode_node == ""
        assert cluster.prefill[0].targets == [None]
        assert cluster.decode[0].requests == []


async def test_nodes_get_ids_seed_and_no_stop_strings() -> None:
    async with ends() as cluster:
        await cluster.ask(TokenPrompt(tuple(range(3, 100))), greedy(stop=("zzz",), seed=7), request_id="mine")
        [request] = cluster.decode[0].requests
        assert request == cluster.prefill[0].requests[0]
        assert request.token_ids == tuple(range(3, 100))
        assert request.num_prompt_tokens == 97
        assert (request.sampling.seed, request.sampling.max_tokens, request.sampling.stop) == (7, 100, ())
        assert request.request_id.startswith("mine#")


async def test_unset_seed_and_max_tokens_are_settled_and_reported() -> None:
    async with ends(default_max_tokens=20) as cluster:
        events = [event async for event in cluster.client.generate(long_prompt(), SamplingParams())]
        accepted = events[0]
        assert isinstance(accepted, RequestAccepted)
        assert accepted.max_tokens == 20
        assert cluster.decode[0].requests[0].sampling.seed == accepted.seed


async def test_stop_string_over_several_tokens_ends_the_answer() -> None:
    async with ends() as cluster:
        outcome = await cluster.ask(sampling=greedy(stop=("never", " 42,")))
        assert outcome.text == "The answer is"
        assert outcome.token_ids == ANSWER_IDS[:17]  # up to and including the comma
        assert outcome.finished.reason is FinishReason.STOP
        assert outcome.finished.stop_string == " 42,"
        assert outcome.finished.usage.completion_tokens == 17


async def test_stop_string_does_not_hide_what_was_cached() -> None:
    async with ends() as cluster:
        cluster.decode[0].num_cached_blocks = 6  # 96 of 100 tokens
        outcome = await cluster.ask(TokenPrompt(tuple(range(3, 103))), greedy(stop=(" is",)))
        assert outcome.finished.stop_string == " is"
        assert outcome.finished.usage.cached == CachedTokens(device=96)
        assert outcome.finished.timing.prefill_s > 0


async def test_stop_string_is_not_looked_for_before_min_tokens() -> None:
    async with ends() as cluster:
        outcome = await cluster.ask(sampling=greedy(stop=("e",), min_tokens=10))
        assert outcome.text == "The answer is 42, what"
        assert outcome.finished.stop_string == "e"


async def test_max_tokens_cut_the_answer() -> None:
    async with ends() as cluster:
        outcome = await cluster.ask(sampling=greedy(max_tokens=3, stop=("e question",)))
        assert outcome.text == "The"  # its "e" was held back until the end
        assert outcome.finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize("max_tokens", [1, 100])
@pytest.mark.parametrize(
    ("sampling", "stop_string"),
    [({"stop_token_ids": ANSWER_IDS[:1]}, ""), ({"stop": ("T",)}, "T"), ({"stop": ("x", "T"), "min_tokens": 1}, "T")],
    ids=["stop token", "stop string", "min_tokens reached"],
)
async def test_first_token_may_end_the_answer(max_tokens: int, sampling: dict[str, Any], stop_string: str) -> None:
    """Computed by the prefill node alone, or handed over with the KV."""
    async with ends() as cluster:
        cluster.prefill[0].cached = CachedTokens(device=48)
        outcome = await cluster.ask(sampling=greedy(max_tokens=max_tokens, **sampling))
        assert (outcome.token_ids, outcome.text) == (ANSWER_IDS[:1], "")
        assert (outcome.finished.reason, outcome.finished.stop_string) == (FinishReason.STOP, stop_string)
        assert outcome.finished.usage == Usage(100, 1, CachedTokens(device=48))
        assert outcome.finished.retries == 0
        assert len(cluster.decode[0].requests) == (0 if max_tokens == 1 else 1)


@pytest.mark.parametrize(
    ("sampling", "text", "num_tokens", "reason"),
    [
        ({"max_tokens": 1, "stop": ("The",)}, "T", 1, FinishReason.LENGTH),  # held back as a start of it, until the end
        ({"min_tokens": 2, "stop": ("T",)}, ANSWER_TEXT, 45, FinishReason.STOP),
        ({"min_tokens": 2, "stop": ("Th",)}, ANSWER_TEXT, 45, FinishReason.STOP),  # it began too early
        ({"min_tokens": 2, "stop": ("h",)}, "T", 2, FinishReason.STOP),
        ({"min_tokens": 3, "stop": ("h",)}, "The answer is 42, w", 20, FinishReason.STOP),
        ({"min_tokens": 3, "max_tokens": 3, "stop": ("The",)}, "The", 3, FinishReason.LENGTH),
    ],
)
async def test_min_tokens_with_stop_strings(
    sampling: dict[str, Any], text: str, num_tokens: int, reason: FinishReason
) -> None:
    """A stop string counts once the answer has min_tokens tokens, and only where it lies in text from then on."""
    async with ends() as cluster:
        outcome = await cluster.ask(sampling=greedy(**sampling))
        assert (outcome.text, outcome.token_ids) == (text, ANSWER_IDS[:num_tokens])
        assert outcome.finished.reason is reason
        assert outcome.finished.usage.completion_tokens == num_tokens


@pytest.mark.parametrize("max_tokens", [1, 3])
async def test_every_token_has_its_logprobs_the_first_included(max_tokens: int) -> None:
    async with ends() as cluster:
        events = cluster.client.generate(long_prompt(), greedy(max_tokens=max_tokens, logprobs=2))
        tokens = [token async for event in events if isinstance(event, TokensGenerated) for token in event.tokens]
        assert [token.logprobs.chosen.logprob for token in tokens if token.logprobs] == [-1.0, -2.0, -3.0][:max_tokens]
        assert [len(token.logprobs.top) for token in tokens if token.logprobs] == [2] * max_tokens
