"""The Prefill RPC of a node without a model: prefix tiers, handoff, refusals, and cancelling at every stage."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvrelay.errors import (
    AlreadyCommittedError,
    BadLogitsError,
    InvalidRequestError,
    KVRelayError,
    NeverFitsError,
    OverloadedError,
    PromptTooLongError,
    StaleError,
    UnavailableError,
)
from kvrelay.kv.hashing import block_hashes, chain_root
from kvrelay.limits import PrefillLimits
from kvrelay.messages import HandoffTarget, NodeRequest, PrefillFinished, PrefillStarted
from kvrelay.sampling import GeneratedToken, SamplingParams
from kvrelay.types import BlockCounts, BlockHash, CachedTokens, Tier
from tests.support.prefill_bench import LAYOUT, MODEL, PrefillBench, make_request, prefill_bench


def hashes_of(request: NodeRequest) -> list[BlockHash]:
    return block_hashes(chain_root(MODEL.fingerprint, LAYOUT.fingerprint, b""), request.token_ids, 16)


async def prefill(bench: PrefillBench, request: NodeRequest, target: HandoffTarget | None = None) -> PrefillFinished:
    async with bench.client.prefill(request, target) as replies:
        started, finished = [event async for event in replies]
    assert isinstance(started, PrefillStarted)
    assert isinstance(finished, PrefillFinished)
    assert started.cached == finished.cached
    return finished


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 31, 32, 33, 200])
async def test_every_token_is_accounted_for_by_tier(num_tokens: int) -> None:
    """Cold, then from the pool: found and computed tokens add up to the prompt, in both runs."""
    async with prefill_bench() as bench:
        request = make_request(num_tokens)
        cold = await prefill(bench, request, bench.target())
        assert cold.cached == CachedTokens()
        assert bench.runner.num_computed == num_tokens
        warm = await prefill(bench, request)
        assert warm.cached == CachedTokens(device=(num_tokens - 1) // 16 * 16)
        assert warm.cached.total + bench.runner.num_computed - num_tokens == num_tokens
        assert cold.first_token == warm.first_token == GeneratedToken(num_tokens)
        assert cold.handoff_bytes == -(-num_tokens // 16) * LAYOUT.slab_bytes
        assert (warm.handoff_bytes, warm.handoff_s) == (0, 0.0)
        assert bench.offered == hashes_of(request) * 2


async def test_a_prefix_comes_from_pool_memory_and_disk_at_once() -> None:
    async with prefill_bench() as bench:
        await prefill(bench, make_request(40))  # 2 full blocks stay in the pool
        request = make_request(100)
        tiers = (Tier.NONE, Tier.NONE, Tier.MEMORY, Tier.DISK, Tier.DISK, Tier.MEMORY)
        bench.store.tiers = dict(zip(hashes_of(request), tiers, strict=True))
        finished = await prefill(bench, request, bench.target())
        assert finished.cached == CachedTokens(device=32, memory=32, disk=32)
        assert bench.runner.num_computed == 40 + 4
        payloads = [bytes(frame.payload)[:1] for frame in bench.receiver.blocks]
        assert payloads == [b"c", b"c", b"s", b"s", b"s", b"s", b"c"]
        sample = bench.registry.get_sample_value
        assert [sample("kvrelay_store_hits_total", {"tier": tier}) for tier in ("memory", "disk")] == [2, 2]
        cached = [
            sample("kvrelay_prefill_tokens_cached_total", {"tier": tier}) for tier in ("device", "memory", "disk")
        ]
        assert cached == [32, 32, 32]
        assert sample("kvrelay_prefill_seconds_count") == 2
        assert sample("kvrelay_handoff_seconds_count") == 1
        assert sample("kvrelay_handoff_tail_seconds_count") == 1
        assert sample("kvrelay_handoff_bytes_total") == sum(len(frame.payload) for frame in bench.receiver.blocks)


@pytest.mark.parametrize("corrupt", [False, True])
async def test_a_store_that_gives_less_than_it_has_leaves_the_rest_to_compute(corrupt: bool) -> None:
    async with prefill_bench() as bench:
        request = make_request(100)
        hashes = hashes_of(request)
        bench.store.tiers = dict.fromkeys(hashes if corrupt else hashes[:3], Tier.MEMORY)
        bench.store.corrupt = {hashes[3]}
        assert (await prefill(bench, request)).cached == CachedTokens(memory=48)
        assert bench.runner.num_computed == 52


async def test_the_last_token_is_computed_though_the_store_has_every_block() -> None:
    async with prefill_bench() as bench:
        request = make_request(64)
        bench.store.tiers = dict.fromkeys(hashes_of(request), Tier.DISK)
        assert (await prefill(bench, request)).cached == CachedTokens(disk=48)


async def test_tenants_share_nothing() -> None:
    async with prefill_bench() as bench:
        request = make_request(64)
        await prefill(bench, request)
        other = NodeRequest(request.request_id, request.token_ids, 64, request.sampling, tenant_salt=b"other")
        assert (await prefill(bench, other)).cached == CachedTokens()


async def test_a_short_prompt_passes_a_long_one() -> None:
    """Both wait for the store; the short one, though admitted later, has its token first."""
    async with prefill_bench(budget=64) as bench:
        bench.store.gate.clear()
        async with bench.client.prefill(make_request(300), None) as long:
            await reach_loading(bench)
            async with bench.client.prefill(make_request(20, first=100), None) as short:
                await bench.wait_for_status(lambda: bench.jobs.status(ready=True).num_running == 2)
                bench.runner.gate.clear()  # or the long one might be through before the engine hears of the other
                bench.store.gate.set()
                for replies in (long, short):
                    assert isinstance(await anext(replies), PrefillStarted)  # told once the engine is to compute it
                bench.runner.gate.set()
                for replies in (long, short):
                    assert isinstance(await anext(replies), PrefillFinished)
        assert bench.runner.drawn == [20, 300]


Reach = Callable[[PrefillBench], Awaitable[None]]


async def reach_waiting(bench: PrefillBench) -> None:
    await bench.wait_for_status(lambda: bench.jobs.status(ready=True).num_waiting == 1)


async def reach_loading(bench: PrefillBench) -> None:
    await bench.store.entered.wait()


async def reach_computing(bench: PrefillBench) -> None:
    await bench.runner.entered.wait()


async def reach_sending(bench: PrefillBench) -> None:
    await bench.receiver.wait_for_blocks(1)


async def reach_committing(bench: PrefillBench) -> None:
    await bench.receiver.wait_for_end()


@pytest.mark.parametrize(
    "reach", [reach_waiting, reach_loading, reach_computing, reach_sending, reach_committing], ids=lambda f: f.__name__
)
async def test_cancelling_frees_every_block(reach: Reach) -> None:
    """Wherever the request is, its blocks are free or cached once the cancel has arrived, and its KV stream is cut."""
    async with prefill_bench(num_blocks=8, max_prefills=1) as bench:
        blocker = None
        if reach in (reach_waiting, reach_loading):
            bench.store.gate.clear()
        if reach is reach_computing:
            bench.runner.gate.clear()
        if reach in (reach_sending, reach_committing):
            bench.receiver.may_acknowledge.clear()
        bench.receiver.hold_commit_only = reach is reach_committing
        if reach is reach_waiting:
            blocker = asyncio.create_task(prefill(bench, make_request(20, first=200)))
            await reach_loading(bench)
        async with bench.client.prefill(make_request(100), bench.target()) as replies:
            reading = asyncio.create_task(_read_all(replies))
            await reach(bench)
        await asyncio.gather(reading, return_exceptions=True)
        if blocker is not None:
            await bench.wait_for_status(lambda: bench.jobs.status(ready=True).num_waiting == 0)
            bench.store.gate.set()
            await blocker
        bench.runner.gate.set()
        await bench.settled()
        await bench.receiver.wait_for_close()
        assert not bench.receiver.committed


async def _read_all(replies: object) -> None:
    async for _ in replies:  # type: ignore[attr-defined]
        pass


async def test_a_broken_kv_stream_ends_the_prefill_and_frees_its_blocks() -> None:
    """The decode node is named, the prompt ends with the step under way, and the node serves on."""
    async with prefill_bench(budget=16) as bench:
        bench.runner.close_gate_after(16)
        bench.receiver.fail_after, bench.receiver.failure = 1, UnavailableError("going away")
        with pytest.raises(UnavailableError, match=r"decode node 127\.0\.0\.1:\d+: going away"):
            await prefill(bench, make_request(500), bench.target())
        bench.runner.gate.set()
        await bench.engine.call(lambda core: None)
        assert bench.runner.num_computed == 32
        bench.receiver.fail_after = None
        bench.receiver.blocks.clear()
        assert (await prefill(bench, make_request(50), bench.target())).handoff_bytes == 4 * LAYOUT.slab_bytes


async def test_a_refused_handoff_fails_with_the_decode_nodes_own_error() -> None:
    async with prefill_bench() as bench:
        bench.receiver.refusal = StaleError("reservation reservation has ended")
        with pytest.raises(StaleError, match=r"decode node .* has ended"):
            await prefill(bench, make_request(50), bench.target())


async def test_an_unreachable_decode_node_is_unavailable() -> None:
    async with prefill_bench() as bench:
        with pytest.raises(UnavailableError, match=r"decode node 127\.0\.0\.1:1: "):
            await prefill(bench, make_request(50), bench.target(address="127.0.0.1:1"))


async def test_a_failed_step_fails_its_request_and_the_node_serves_on() -> None:
    async with prefill_bench() as bench:
        bench.runner.error = RuntimeError("logits are NaN")
        with pytest.raises(KVRelayError, match="logits are NaN"):
            await prefill(bench, make_request(50), bench.target())
        bench.runner.error = None
        bench.receiver.blocks.clear()
        assert (await prefill(bench, make_request(50), bench.target())).first_token == GeneratedToken(50)


@pytest.mark.parametrize("error", [UnavailableError("cut"), AlreadyCommittedError("has its KV already")])
async def test_a_prompt_whose_commit_is_not_confirmed_counts_as_computed_and_is_offered(error: KVRelayError) -> None:
    async with prefill_bench() as bench:
        bench.receiver.end_failure = error
        with pytest.raises(type(error), match="decode node"):
            await prefill(bench, make_request(50), bench.target())
        assert len(bench.offered) == 3
        assert bench.registry.get_sample_value("kvrelay_prefill_tokens_computed_total") == 50


async def test_a_stuck_engine_gives_every_prompt_up() -> None:
    """One computes, one waits for the engine to take it in; each may go elsewhere, and a third is refused at once."""
    async with prefill_bench() as bench:
        bench.runner.gate.clear()
        computing = asyncio.create_task(prefill(bench, make_request(50), bench.target()))
        await bench.runner.entered.wait()
        waiting = asyncio.create_task(prefill(bench, make_request(51), bench.target()))
        while len(bench.jobs._jobs) < 2:  # the server runs in this very loop
            await asyncio.sleep(0)
        bench.now += 9.5
        bench.jobs.fail_if_stuck()
        bench.now += 1.0
        bench.jobs.fail_if_stuck()
        for call in (computing, waiting):
            with pytest.raises(UnavailableError, match="engine is stuck; use another"):
                await asyncio.wait_for(call, 60.0)
        with pytest.raises(UnavailableError, match="engine is stuck; use another"):
            await prefill(bench, make_request(52), bench.target())
        bench.runner.gate.set()


async def test_bad_logits_reach_the_caller_by_their_code() -> None:
    async with prefill_bench() as bench:
        bench.runner.bad_lengths = {50}
        with pytest.raises(BadLogitsError) as failed:
            await prefill(bench, make_request(50), bench.target())
        assert (failed.value.code, failed.value.status.name, failed.value.retryable) == (
            "bad_logits",
            "INTERNAL",
            False,
        )
        assert (await prefill(bench, make_request(51), bench.target())).first_token == GeneratedToken(51)


async def test_first_block_says_where_the_stream_starts() -> None:
    async with prefill_bench() as bench:
        finished = await prefill(bench, make_request(100), bench.target(first_block=5))
        assert [frame.block_index for frame in bench.receiver.blocks] == [5, 6]
        assert finished.handoff_bytes == 2 * LAYOUT.slab_bytes


@pytest.mark.parametrize(
    ("num_tokens", "first_block", "error", "message"),
    [
        (1_025, 0, PromptTooLongError, "1025 tokens are more than the model's 1024"),
        (600, 0, NeverFitsError, "needs 38 KV blocks; this prefill node has 32"),
        (32, 2, InvalidRequestError, r"first_block is 2; allowed is \[0, 1\]"),
    ],
)
async def test_what_can_never_work_is_refused_at_once(
    num_tokens: int, first_block: int, error: type[KVRelayError], message: str
) -> None:
    async with prefill_bench() as bench:
        with pytest.raises(error, match=message):
            await prefill(bench, make_request(num_tokens), bench.target(first_block))


@pytest.mark.parametrize(
    ("token_ids", "sampling", "message"),
    [
        ((300,), SamplingParams(seed=0), r"token_ids holds 300; token ids are in \[0, 300\)"),
        ((1,), SamplingParams(seed=0, top_p=0.0), "top_p is 0.0"),
        ((1,), SamplingParams(), "seed is not set"),
        ((), SamplingParams(seed=0), "token_ids is empty"),
    ],
)
async def test_bad_fields_are_named(token_ids: tuple[int, ...], sampling: SamplingParams, message: str) -> None:
    async with prefill_bench() as bench:
        request = make_request(1)
        bad = NodeRequest(request.request_id, token_ids, len(token_ids), sampling)
        with pytest.raises(InvalidRequestError, match=message):
            await prefill(bench, bad)


async def test_a_full_queue_answers_overloaded() -> None:
    async with prefill_bench(max_prefills=1, max_waiting=0) as bench:
        bench.store.gate.clear()
        first = asyncio.create_task(prefill(bench, make_request(20)))
        await reach_loading(bench)
        with pytest.raises(OverloadedError, match="1 prompts in work"):
            await prefill(bench, make_request(20))
        bench.store.gate.set()
        await first


async def test_draining_lets_running_prompts_end_and_takes_no_new_ones() -> None:
    async with prefill_bench() as bench:
        bench.runner.gate.clear()
        running = asyncio.create_task(prefill(bench, make_request(20)))
        await bench.runner.entered.wait()
        draining = asyncio.create_task(bench.jobs.drain())
        await bench.wait_for_status(lambda: bench.jobs.status(ready=False).draining)
        assert bench.jobs.status(ready=False).num_slots_free == 0
        with pytest.raises(UnavailableError, match="draining"):
            await prefill(bench, make_request(20))
        assert not draining.done()
        bench.runner.gate.set()
        assert (await running).first_token == GeneratedToken(20)
        await draining


async def test_status_follows_the_engine() -> None:
    async with prefill_bench(num_blocks=8, max_prefills=2, max_waiting=1) as bench:
        bench.runner.gate.clear()
        running = asyncio.create_task(prefill(bench, make_request(40)))
        await bench.runner.entered.wait()
        status = bench.jobs.status(ready=True)
        assert (status.ready, status.num_running, status.num_slots_free) == (True, 1, 2)
        bench.runner.gate.set()
        await running
        await bench.wait_for_status(lambda: bench.jobs.status(ready=True).num_running == 0)
        assert bench.jobs.status(ready=True).blocks == BlockCounts(total=8, free=6, reserved=0, held=0, cached=2)


async def test_limits_are_replaced_over_the_wire_and_told_in_the_status() -> None:
    async with prefill_bench(budget=64) as bench:
        before = PrefillLimits(max_batched_tokens=64, chunk_tokens=64, max_prefills=4, max_waiting=4)
        await prefill(bench, make_request(1))
        assert bench.jobs.status(ready=True).limits == before
        with pytest.raises(InvalidRequestError, match="chunk_tokens is 0; allowed is at least 1"):
            await bench.client.set_limits(PrefillLimits(64, 0, 4, 4))
        wanted = PrefillLimits(max_batched_tokens=20, chunk_tokens=20, max_prefills=1, max_waiting=0)
        assert await bench.client.set_limits(wanted) == wanted
        await prefill(bench, make_request(100))
        status = bench.jobs.status(ready=True)
        assert (status.limits, status.num_slots_free) == (wanted, 1)
        assert bench.runner.num_steps == 1 + 5, "100 tokens at 20 a step"
