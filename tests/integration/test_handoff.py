"""Prefill node and decode node on a tiny model: tokens through a handoff are those of one engine alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.errors import StaleError
from kvrelay.kv.frame import FrameKind, block_frame, control_frame, encode
from kvrelay.kv.hashing import block_hashes, chain_root
from kvrelay.messages import (
    HandoffBegin,
    NodeRequest,
    PrefillFinished,
    ReservationGranted,
)
from kvrelay.rpc import convert_decode, raw
from kvrelay.rpc.channel import cancelling, open_channel
from kvrelay.sampling import SamplingParams
from kvrelay.types import FinishReason, RequestId
from tests.support.handoff_pair import NUM_BLOCKS, TIMEOUT_S, Pair, pair
from tests.support.reference import ReferenceEngine
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=5)


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[ReferenceEngine]:
    return ReferenceEngine(model, NUM_BLOCKS)


def make_request(num_tokens: int, seed: int = 1, temperature: float = 0.0, max_tokens: int = 8) -> NodeRequest:
    token_ids = tuple(3 + (seed * 31 + 7 * i) % 250 for i in range(num_tokens))
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True)
    return NodeRequest(RequestId(f"r{seed}-{num_tokens}"), token_ids, num_tokens, sampling)


@pytest.mark.parametrize("chunk_tokens", [7, 64])
async def test_tokens_are_those_of_one_engine_alone(model: Path, reference: ReferenceEngine, chunk_tokens: int) -> None:
    """Cold, then with every full block but the last one on both nodes, which then are not sent."""
    async with pair(model, chunk_tokens=chunk_tokens) as nodes:
        for num_tokens in (1, 2, 15, 16, 17, 31, 32, 33, 100, 250):
            for temperature in (0.0, 0.8):
                request = make_request(num_tokens, seed=num_tokens, temperature=temperature)
                token_ids, finished, granted = await nodes.answer(request)
                assert token_ids == reference.answer(request)
                num_sent = -(-num_tokens // 16) - granted.num_cached_blocks
                assert finished.handoff_bytes == num_sent * 8_192
                if temperature:  # the second time round
                    assert granted.num_cached_blocks == (num_tokens - 1) // 16
                    assert finished.cached.device == (num_tokens - 1) // 16 * 16


async def test_requests_at_once_do_not_change_each_other(model: Path, reference: ReferenceEngine) -> None:
    async with pair(model, chunk_tokens=32, max_batched_tokens=48) as nodes:
        requests = [make_request(20 + 17 * i, seed=i, temperature=0.7 * (i % 2)) for i in range(8)]
        answers = await asyncio.gather(*(nodes.answer(request) for request in requests))
        assert [token_ids for token_ids, _, _ in answers] == [reference.answer(request) for request in requests]


async def test_a_prompt_that_shares_a_prefix_sends_only_the_rest(model: Path, reference: ReferenceEngine) -> None:
    async with pair(model) as nodes:
        short = make_request(40, seed=1)
        await nodes.answer(short)
        longer = make_request(90, seed=1)
        assert longer.token_ids[:40] == short.token_ids
        token_ids, finished, granted = await nodes.answer(longer)
        assert token_ids == reference.answer(longer)
        assert granted.num_cached_blocks == 2
        assert finished.handoff_bytes == 4 * 8_192


async def test_a_resumed_request_goes_on_where_it_was(model: Path, reference: ReferenceEngine) -> None:
    """Prompt and earlier output as token_ids: the draws are those of the uninterrupted answer."""
    async with pair(model) as nodes:
        request = make_request(50, seed=4, temperature=0.9, max_tokens=12)
        expected = reference.answer(request)
        resumed = NodeRequest(request.request_id, request.token_ids + tuple(expected[:5]), 50, request.sampling)
        granted = await nodes.decode.reserve(resumed, 62, TIMEOUT_S)
        reading = asyncio.create_task(nodes.tokens(granted))
        await nodes.compute(resumed, nodes.target(granted))
        assert (await reading)[0] == expected[5:]


async def test_a_handoff_is_repeated_after_its_stream_was_cut(model: Path, reference: ReferenceEngine) -> None:
    """The first attempt leaves a wrong, if well-formed, block behind; the second one's KV is what counts."""
    async with pair(model, chunk_tokens=16) as nodes:
        request = make_request(100, seed=6)
        granted = await nodes.reserve(request)
        reading = asyncio.create_task(nodes.tokens(granted))
        await send_one_block_and_break_off(nodes, request, granted)
        finished = await nodes.compute(request, nodes.target(granted, attempt=2))
        token_ids, _ = await reading
        assert token_ids == reference.answer(request)
        assert finished.handoff_bytes == 7 * 8_192


async def send_one_block_and_break_off(nodes: Pair, request: NodeRequest, granted: ReservationGranted) -> None:
    info = nodes.prefill_app.host.loaded.info
    begin = HandoffBegin(
        granted.reservation_id, granted.instance_id, 1, info.fingerprint, info.layout.fingerprint, 0, 7
    )
    root = chain_root(info.fingerprint, info.layout.fingerprint, b"")
    first_hash = block_hashes(root, request.token_ids, 16)[0]
    frames = (
        control_frame(FrameKind.BEGIN, convert_decode.handoff_begin_to_bytes(begin)),
        block_frame(0, first_hash, b"\x3f" * info.layout.slab_bytes),
    )
    channel = open_channel(nodes.decode_address)
    async with channel, cancelling(raw.stream_stream(channel, raw.KV_TRANSFER, "Receive")()) as call:
        for num_blocks, frame in enumerate(frames):
            await call.write(encode(frame))
            received = convert_decode.blocks_received_from_bytes(await call.read())
            assert received.num_blocks == num_blocks


async def test_a_cancelled_prefill_can_be_repeated(model: Path, reference: ReferenceEngine) -> None:
    """The call is left as soon as the node began to work, while it computes and sends; at once another one follows."""
    async with pair(model, chunk_tokens=16) as nodes:
        request = make_request(300, seed=7)
        granted = await nodes.reserve(request)
        reading = asyncio.create_task(nodes.tokens(granted))
        for attempt in range(1, 6):
            async with nodes.prefill.prefill(request, nodes.target(granted, attempt)) as events:
                await anext(events)
        await nodes.compute(request, nodes.target(granted, attempt=6))
        token_ids, _ = await reading
        assert token_ids == reference.answer(request)


async def test_a_handoff_for_an_ended_reservation_is_refused(model: Path) -> None:
    async with pair(model) as nodes:
        request = make_request(60, seed=8)
        granted = await nodes.reserve(request)
        await nodes.decode.release(granted.reservation_id)
        with pytest.raises(StaleError, match=f"decode node {nodes.decode_address}"):
            await nodes.compute(request, nodes.target(granted))


async def test_ending_the_reservation_ends_the_prefill(model: Path) -> None:
    """The prefill node hears of it on its KV stream and stops, though most of the prompt is not computed yet."""
    async with pair(model, chunk_tokens=1) as nodes:
        request = make_request(900, seed=9)
        granted = await nodes.reserve(request)
        engine_may_go_on = threading.Event()
        try:
            async with nodes.prefill.prefill(request, nodes.target(granted)) as events:
                await anext(events)
                nodes.prefill_app.host.engine.post(lambda core: engine_may_go_on.wait(TIMEOUT_S))
                await nodes.decode.release(granted.reservation_id)
                with pytest.raises(StaleError, match=f"decode node {nodes.decode_address}"):
                    await anext(events)
        finally:
            engine_may_go_on.set()


FORCE_EOS = {2: 100.0}  # a bias that makes the end of the sequence the likeliest token wherever it is allowed


@pytest.mark.parametrize(("min_tokens", "num_tokens"), [(0, 1), (1, 2), (3, 4)])
async def test_the_end_of_the_sequence_may_be_the_first_token_unless_min_tokens_forbids(
    model: Path, min_tokens: int, num_tokens: int
) -> None:
    async with pair(model) as nodes:
        sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=8, min_tokens=min_tokens, logit_bias=FORCE_EOS)
        request = replace(make_request(40), sampling=sampling)
        granted = await nodes.reserve(request)
        reading = asyncio.create_task(nodes.tokens(granted))
        finished = await nodes.compute(request, nodes.target(granted))
        token_ids, end = await reading
        assert token_ids[0] == finished.first_token.token_id
        assert len(token_ids) == num_tokens
        assert [token_id == 2 for token_id in token_ids] == [False] * min_tokens + [True]
        assert end.reason is FinishReason.STOP


async def test_a_single_token_needs_no_decode_node_and_may_be_the_end(model: Path) -> None:
    async with pair(model) as nodes:
        sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=1, logit_bias=FORCE_EOS, logprobs=1)
        async with nodes.prefill.prefill(replace(make_request(40), sampling=sampling), None) as events:
            finished = [event async for event in events][-1]
        assert isinstance(finished, PrefillFinished)
        assert finished.first_token.token_id == 2
        logprobs = finished.first_token.logprobs
        assert logprobs is not None
        assert logprobs.chosen.token_id == 2
        assert logprobs.top[0].logprob > logprobs.chosen.logprob  # the model's own opinion, without the bias


async def test_the_first_token_is_handed_over_with_its_logprobs(model: Path) -> None:
    """They are what the prefill node reports, and what a node that computes the prompt itself finds."""
    async with pair(model) as nodes:
        request = make_request(40)
        request = replace(request, sampling=replace(request.sampling, logprobs=3, max_tokens=3))
        granted = await nodes.reserve(request)
        reading = asyncio.create_task(nodes.generated(granted))
        finished = await nodes.compute(request, nodes.target(granted))
        first, *rest = await reading
        assert first == finished.first_token
        assert first.logprobs is not None
        assert len(first.logprobs.top) == 3
        assert first.logprobs.top[0] == first.logprobs.chosen  # greedy
        computed = await nodes.generated(await nodes.reserve(request), compute_tail=True)
        assert len(computed) == 1 + len(rest) == 3
        for ours, theirs in zip((first, *rest), computed, strict=True):
            assert ours.logprobs is not None
            assert theirs.logprobs is not None
            assert ours.logprobs.chosen.token_id == theirs.logprobs.chosen.token_id
            assert ours.logprobs.chosen.logprob == pytest.approx(theirs.logprobs.chosen.logprob, abs=1e-3)
