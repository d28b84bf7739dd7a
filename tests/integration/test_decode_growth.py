"""A decode node whose answers grow, over gRPC: preemption, the way back by the kvstore, forks, limits."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncGenerator, Sequence

import pytest

from decode_node.resume import Resume, ResumeCosts
from kvrelay.errors import InvalidRequestError, NeverFitsError, NotFoundError, OverloadedError
from kvrelay.kv.chain import Chain
from kvrelay.kv.hashing import Buffer, block_hashes, chain_root
from kvrelay.limits import DecodeLimits
from kvrelay.messages import DecodeFinished, NodeRequest, ReservationGranted
from kvrelay.types import BlockHash, CachedTokens, Tier
from tests.support.decode_harness import Harness, decode_node
from tests.support.fake_engine import LAYOUT, make_info, make_request
from tests.support.slot_engine import Gate, SlotCache, SlotRunner, reference_answer

INFO = make_info(max_model_len=1_000)
SIZE = LAYOUT.block_tokens


def request(num_prompt: int, max_tokens: int, first: int = 10, seed: int = 0) -> NodeRequest:
    return make_request(tuple(range(first, first + num_prompt)), max_tokens, temperature=0.8, seed=seed)


async def reserve(harness: Harness, one: NodeRequest, num_tokens_now: int = 0) -> ReservationGranted:
    num_tokens = one.num_prompt_tokens + (one.sampling.max_tokens or 0)
    return await harness.client.reserve(one, num_tokens, timeout_s=60.0, num_tokens_now=num_tokens_now)


async def read(harness: Harness, granted: ReservationGranted, *, tail: bool = True) -> tuple[list[int], DecodeFinished]:
    token_ids: list[int] = []
    async with harness.client.decode(granted.reservation_id, tail, timeout_s=60.0) as events:
        async for event in events:
            if isinstance(event, DecodeFinished):
                return token_ids, event
            token_ids += [token.token_id for token in event.tokens]
    raise AssertionError("the stream ended early")


class ToldCosts(ResumeCosts):
    resume = Resume.SWAP

    def choose(self) -> Resume:
        return self.resume


class SlotStore:
    """Has every full block of some requests and their answers; hangs while `gate` is closed."""

    def __init__(self, requests: Sequence[NodeRequest]) -> None:
        self.slabs: dict[BlockHash, bytes] = {}
        self.gate = asyncio.Event()
        self.entered = asyncio.Event()
        self.fails = False
        root = chain_root(INFO.fingerprint, LAYOUT.fingerprint, b"")
        for one in requests:
            tokens = [*one.token_ids, *reference_answer(one)]
            for index, block_hash in enumerate(block_hashes(root, tokens, SIZE)):
                self.slabs[block_hash] = struct.pack(f"<{SIZE}I", *tokens[index * SIZE : (index + 1) * SIZE])

    async def get(
        self, hashes: Sequence[BlockHash], chain: Chain | None = None
    ) -> AsyncGenerator[tuple[BlockHash, Buffer, Tier], None]:
        self.entered.set()
        await self.gate.wait()
        if self.fails:
            raise RuntimeError("a fault of ours")
        for block_hash in hashes:
            yield block_hash, self.slabs[block_hash], Tier.MEMORY


def slot_engine(num_blocks: int) -> tuple[SlotCache, SlotRunner]:
    cache = SlotCache(num_blocks, SIZE)
    return cache, SlotRunner(cache)


async def opened(harness: Harness, granted: ReservationGranted) -> None:
    """Waits until a reservation's answer is read."""
    async with asyncio.timeout(60.0):
        while not harness.node.reservations.get(granted.reservation_id).decoding:
            await asyncio.sleep(0.001)


async def forked_meanwhile(
    harness: Harness, gate: Gate, granted: ReservationGranted, *indices: int
) -> list[ReservationGranted]:
    """Forks of a request whose second step has not ended."""
    await gate.reached()
    before = harness.node.status().num_slots_free
    forking = [asyncio.create_task(harness.client.fork(granted.reservation_id, index)) for index in indices]
    async with asyncio.timeout(60.0):
        while harness.node.status().num_slots_free > before - len(indices):  # until the node has asked its engine
            await asyncio.sleep(0.001)
    gate.open()
    return await asyncio.gather(*forking)


async def test_answers_that_grow_past_the_memory_end_whole_and_each_preemption_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "decode_node.node")
    cache, runner = slot_engine(8)
    requests = [request(6, 14, first=10 + 20 * number) for number in range(4)]
    async with decode_node(
        info=INFO, cache=cache, runner=runner, num_blocks=8, max_batched_tokens=32, reserve_output_tokens=1
    ) as harness:
        granted = [await reserve(harness, one) for one in requests]
        answers = await asyncio.gather(*(read(harness, one) for one in granted))
        for one, (token_ids, finished) in zip(requests, answers, strict=True):
            assert token_ids == reference_answer(one)
            assert finished.cached == CachedTokens()
        lines = [record for record in caplog.records if "gave its blocks to an older one" in record.message]
        count = harness.registry.get_sample_value("kvrelay_preemptions_total", {"resume": "recompute"})
        assert count == len(lines) >= 1
        assert harness.registry.get_sample_value("kvrelay_preemptions_total", {"resume": "swap"}) == 0


async def test_a_request_may_say_how_much_to_set_aside_and_its_answer_is_the_same() -> None:
    """Full, a pool of 8 blocks of 4 holds one request of 20 positions; with 8 positions each it holds four, of which
    some give way as they grow."""
    cache, runner = slot_engine(8)
    requests = [request(6, 14, first=10 + 20 * number) for number in range(4)]
    async with decode_node(info=INFO, cache=cache, runner=runner, num_blocks=8, max_batched_tokens=32) as harness:
        granted = [await reserve(harness, requests[0])]
        assert (await harness.counts()).reserved == 5
        with pytest.raises(OverloadedError):
            await reserve(harness, requests[1])
        await harness.client.release(granted.pop().reservation_id)
        await harness.all_free()
        granted = [await reserve(harness, one, 8) for one in requests]
        assert (await harness.counts()).reserved == 8
        answers = await asyncio.gather(*(read(harness, one) for one in granted))
        assert [token_ids for token_ids, _ in answers] == [reference_answer(one) for one in requests]
        assert harness.registry.get_sample_value("kvrelay_preemptions_total", {"resume": "recompute"}) >= 1  # type: ignore[operator]


async def test_what_a_request_says_to_set_aside_goes_before_the_nodes_setting() -> None:
    cache, runner = slot_engine(24)
    async with decode_node(info=INFO, cache=cache, runner=runner, num_blocks=24, reserve_output_tokens=1) as harness:
        granted = await reserve(harness, request(6, 14), 17)
        assert (await harness.counts()).reserved == 5
        with pytest.raises(InvalidRequestError, match=r"num_tokens_now is 6; allowed is 0, or \[7, 20\]"):
            await reserve(harness, request(6, 14), 6)
        await harness.client.release(granted.reservation_id)


async def test_what_never_fits_is_refused_at_once_however_little_is_set_aside() -> None:
    cache, runner = slot_engine(8)
    async with decode_node(info=INFO, cache=cache, runner=runner, num_blocks=8, reserve_output_tokens=1) as harness:
        with pytest.raises(NeverFitsError, match="9 KV blocks are needed; this node has 8 in all"):
            await reserve(harness, request(6, 27))
        granted = await reserve(harness, request(6, 26))
        assert (await harness.counts()).reserved == 2
        assert (await read(harness, granted))[0] == reference_answer(request(6, 26))


@pytest.mark.parametrize("ended_by", ["itself", "a cancel", "a fault"])
async def test_a_preempted_request_comes_back_by_the_kvstore(ended_by: str) -> None:
    cache, runner = slot_engine(5)
    older, younger = request(4, 16), request(4, 12, first=60)
    store = SlotStore([younger])
    async with decode_node(
        info=INFO,
        cache=cache,
        runner=runner,
        num_blocks=5,
        max_batched_tokens=32,
        reserve_output_tokens=1,
        costs=ToldCosts(LAYOUT, with_store=True),
        store=store,
    ) as harness:
        first, second = await reserve(harness, older), await reserve(harness, younger)
        gate = Gate(runner)
        reading = asyncio.create_task(read(harness, first))
        await gate.reached()
        waiting = asyncio.create_task(read(harness, second))
        await opened(harness, second)
        gate.open()
        await store.entered.wait()
        assert (await reading)[0] == reference_answer(older)
        assert harness.node.status().num_waiting == 1
        if ended_by == "a cancel":
            waiting.cancel()
            await asyncio.wait([waiting])
            return  # the harness proves that nothing is held
        store.fails = ended_by == "a fault"
        store.gate.set()
        if ended_by == "a fault":
            with pytest.raises(Exception, match="could not come back"):
                await waiting
            return
        assert (await waiting)[0] == reference_answer(younger)
        assert harness.registry.get_sample_value("kvrelay_preempted_blocks_loaded_total", {"tier": "memory"}) == 2
        assert runner.num_computed == (4 + 16 - 1) + (4 + 12 - 1) + 8 - 2 * SIZE


async def test_forks_of_a_prompt_have_streams_of_their_own() -> None:
    cache, runner = slot_engine(24)
    one = request(6, 8, seed=5)
    async with decode_node(info=INFO, cache=cache, runner=runner, num_blocks=24, max_batch=2) as harness:
        granted = await harness.client.reserve(one, 14, timeout_s=60.0, itl_target_s=0.5)
        with pytest.raises(NotFoundError, match="is not here to be shared"):
            await harness.client.fork(granted.reservation_id, 1)
        with pytest.raises(InvalidRequestError, match="index is 0; allowed is at least 1"):
            await harness.client.fork(granted.reservation_id, 0)
        gate = Gate(runner, after=1)
        async with harness.client.decode(granted.reservation_id, compute_tail=True) as events:
            first = await anext(events)
            forks = await forked_meanwhile(harness, gate, granted, 1, 2)
            sequences = [harness.node.reservations.get(fork.reservation_id).sequence for fork in forks]
            assert [sequence.itl_target_s for sequence in sequences] == [0.5, 0.5]
            answers = await asyncio.gather(*(read(harness, fork, tail=False) for fork in forks))
            rest = [event async for event in events]
        own = [token.token_id for event in [first, *rest[:-1]] for token in event.tokens]  # type: ignore[union-attr]
        assert own == reference_answer(one)
        assert len({tuple(own), *(tuple(token_ids) for token_ids, _ in answers)}) == 3
        assert runner.num_computed == (6 + 8 - 1) + 2 * 8, "the prompt once, its last token once for each"


async def test_a_fork_that_nobody_reads_is_given_back_like_any_reservation() -> None:
    cache, runner = slot_engine(24)
    async with decode_node(info=INFO, cache=cache, runner=runner, num_blocks=24) as harness:
        granted = await reserve(harness, request(6, 8))
        gate = Gate(runner, after=1)
        async with harness.client.decode(granted.reservation_id, compute_tail=True) as events:
            await anext(events)
            (fork,) = await forked_meanwhile(harness, gate, granted, 1)
        await harness.client.release(fork.reservation_id)
        await harness.all_free()


async def test_limits_are_replaced_over_the_wire_and_told_in_the_status() -> None:
    cache, runner = slot_engine(24)
    async with decode_node(info=INFO, cache=cache, runner=runner, num_blocks=24, max_batch=2) as harness:
        before = DecodeLimits(max_batch=2, max_batched_tokens=8, max_requests=8)
        assert harness.node.status().limits == before
        with pytest.raises(InvalidRequestError, match="max_batch is 9; allowed is at most max_batched_tokens, 8"):
            await harness.client.set_limits(DecodeLimits(9, 8, 8))
        with pytest.raises(InvalidRequestError, match="max_requests is 0; allowed is at least 1"):
            await harness.client.set_limits(DecodeLimits(2, 8, 0))
        assert harness.node.status().limits == before
        wanted = DecodeLimits(max_batch=1, max_batched_tokens=3, max_requests=2, reserve_output_tokens=4)
        assert await harness.client.set_limits(wanted) == wanted
        assert harness.node.status().limits == wanted
        granted = [await reserve(harness, request(6, 20, first=10 + 30 * number)) for number in range(2)]
        assert (await harness.counts()).reserved == 2 * LAYOUT.blocks_for(6 + 4)
        with pytest.raises(OverloadedError, match="2 requests hold blocks here; at most 2 may"):
            await reserve(harness, request(1, 1))
        await asyncio.gather(*(read(harness, one) for one in granted))
        assert max(len(rows) for rows in runner.batches) == 1
        assert max(sum(rows) for rows in runner.batches) == 3
