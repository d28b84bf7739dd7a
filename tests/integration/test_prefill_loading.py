"""A prefill node and its store: what is waited for, what is computed meanwhile, and what is counted.

Steps of 64 tokens, 4 blocks each; the runner hangs where a test wants to see both at work.
"""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.errors import StaleError
from kvrelay.kv.hashing import block_hashes, chain_root
from kvrelay.messages import NodeRequest, PrefillFinished, PrefillStarted
from kvrelay.types import BlockHash, CachedTokens, Tier
from tests.support.prefill_bench import LAYOUT, MODEL, PrefillBench, make_request, prefill_bench


def hashes_of(request: NodeRequest) -> list[BlockHash]:
    return block_hashes(chain_root(MODEL.fingerprint, LAYOUT.fingerprint, b""), request.token_ids, 16)


async def prefill(bench: PrefillBench, request: NodeRequest) -> PrefillFinished:
    bench.receiver.blocks.clear()
    async with bench.client.prefill(request, bench.target()) as replies:
        started, finished = [event async for event in replies]
    assert isinstance(started, PrefillStarted)
    assert isinstance(finished, PrefillFinished)
    assert started.cached == finished.cached
    return finished


def outcomes(bench: PrefillBench) -> dict[str, float]:
    return {
        sample.labels["outcome"]: sample.value
        for family in bench.registry.collect()
        if family.name == "kvrelay_store_load_outcomes"
        for sample in family.samples
        if sample.name.endswith("_total")
    }


async def measure(bench: PrefillBench) -> None:
    """From now on the node knows what computing costs: a 64th of a second a block. Nothing of it stays in the pool."""
    bench.jobs._loader.costs.computed(64, 64 / 1_024)


async def test_a_store_that_gives_all_in_time_is_waited_for() -> None:
    async with prefill_bench() as bench:
        request = make_request(200)
        bench.store.tiers = dict.fromkeys(hashes_of(request), Tier.MEMORY)
        assert (await prefill(bench, request)).cached == CachedTokens(memory=192)
        assert bench.runner.num_computed == 8
        assert outcomes(bench) == {"complete": 1}
        assert bench.registry.get_sample_value("kvrelay_store_load_tokens_total") == 192
        assert bench.registry.get_sample_value("kvrelay_store_load_seconds_count") == 1


async def test_a_store_that_hangs_costs_its_head_start_and_no_answer() -> None:
    async with prefill_bench() as bench:
        await measure(bench)
        bench.store.gate.clear()
        assert (await prefill(bench, make_request(200))).cached == CachedTokens()
        assert bench.runner.num_computed == 200
        assert outcomes(bench) == {"stalled": 1}
        assert bench.store.num_failures == 0, "its clock stood still, so it was not late"


async def test_a_store_that_hangs_for_long_is_told_to_be_failing() -> None:
    async with prefill_bench() as bench:
        await measure(bench)
        bench.store.gate.clear()
        bench.runner.gate.clear()
        waiting = asyncio.create_task(prefill(bench, make_request(200)))
        await bench.runner.entered.wait()
        bench.now += 0.3
        bench.runner.gate.set()
        await waiting
        assert bench.store.num_failures == 1


async def test_after_a_stall_the_store_is_left_out_for_some_prompts() -> None:
    async with prefill_bench() as bench:
        await measure(bench)
        bench.store.gate.clear()
        bench.runner.gate.clear()
        waiting = asyncio.create_task(prefill(bench, make_request(200)))
        await bench.runner.entered.wait()
        bench.now += 5.0
        bench.runner.gate.set()
        await waiting
        await prefill(bench, make_request(200, first=250))
        assert outcomes(bench) == {"stalled": 1, "skipped": 1}


async def test_what_comes_in_the_head_start_leaves_for_the_decode_node_at_once() -> None:
    """The store gives blocks 0 to 6, then hangs; before the engine computes anything, they have arrived there."""
    async with prefill_bench() as bench:
        request = make_request(200)
        hashes = hashes_of(request)
        bench.store.tiers = dict.fromkeys(hashes, Tier.DISK)
        bench.store.hangs = {hashes[7]}
        reading = asyncio.create_task(prefill(bench, request))
        await bench.receiver.wait_for_blocks(7)
        assert bench.runner.num_steps == 0
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_after_the_head_start_the_rest_is_loaded_from_its_end() -> None:
    """The store hangs at block 7, whichever way it is asked; that one alone is computed."""
    async with prefill_bench(budget=16) as bench:
        await measure(bench)
        request = make_request(200)
        hashes = hashes_of(request)
        bench.store.tiers = dict.fromkeys(hashes, Tier.DISK)
        bench.store.hangs = {hashes[7]}
        bench.runner.gate.clear()
        reading = asyncio.create_task(prefill(bench, request))
        await bench.runner.entered.wait()
        while bench.store.num_given < 11:
            await asyncio.sleep(0)
        bench.runner.gate.set()
        assert (await reading).cached == CachedTokens(disk=176)
        assert bench.runner.num_computed == 24
        assert outcomes(bench) == {"met": 1}
        payloads = [bytes(frame.payload)[:1] for frame in bench.receiver.blocks]
        assert payloads == [*[b"s"] * 7, b"c", *[b"s"] * 4, b"c"]
        again = await prefill(bench, request)
        assert again.cached == CachedTokens(device=192), "what was loaded serves later prompts too"


async def test_beside_a_store_that_is_hardly_faster_the_engine_begins_at_once() -> None:
    """It computes blocks 0 to 3 in its first step; meanwhile 11 to 8 come, and then no more."""
    async with prefill_bench() as bench:
        await measure(bench)
        bench.jobs._loader.costs.loaded(101, 0.01, 0.01 + 100 * 0.02)
        request = make_request(200)
        hashes = hashes_of(request)
        bench.store.tiers = dict.fromkeys(hashes, Tier.DISK)
        bench.store.hangs = {hashes[7]}
        bench.runner.gate.clear()
        reading = asyncio.create_task(prefill(bench, request))
        await asyncio.gather(bench.runner.entered.wait(), bench.store.hung.wait())
        bench.runner.gate.set()
        assert (await reading).cached == CachedTokens(disk=64)
        assert bench.runner.num_computed == 200 - 64
        assert outcomes(bench) == {"met": 1}
        payloads = [bytes(frame.payload)[:1] for frame in bench.receiver.blocks]
        assert payloads == [*[b"c"] * 8, *[b"s"] * 4, b"c"]


async def test_a_handoff_that_fails_in_the_head_start_is_heard_of_at_once() -> None:
    async with prefill_bench() as bench:
        bench.store.gate.clear()
        bench.receiver.refusal = StaleError("reservation reservation has ended")
        async with asyncio.timeout(25.0):  # of a head start of 30
            with pytest.raises(StaleError, match=r"decode node .* has ended"):
                await prefill(bench, make_request(200))


async def test_what_the_store_says_it_has_and_does_not_give_is_computed() -> None:
    async with prefill_bench() as bench:
        request = make_request(200)
        hashes = hashes_of(request)
        bench.store.tiers = dict.fromkeys(hashes, Tier.MEMORY)
        bench.store.corrupt = {hashes[11]}
        assert (await prefill(bench, request)).cached == CachedTokens(memory=176)
        assert bench.runner.num_computed == 24
        assert outcomes(bench) == {"short": 1}


async def test_a_store_without_any_of_it_is_not_waited_for() -> None:
    async with prefill_bench() as bench:
        await asyncio.wait_for(prefill(bench, make_request(200)), 60.0)
        assert outcomes(bench) == {"missed": 1}


async def test_only_the_blocks_that_the_store_has_are_kept_from_the_engine() -> None:
    """Of 12 it has 6, and hangs at the fifth of them; the sixth may come before the engine takes it."""
    async with prefill_bench() as bench:
        await measure(bench)
        request = make_request(200)
        hashes = hashes_of(request)
        bench.store.tiers = dict.fromkeys(hashes[:6], Tier.MEMORY)
        bench.store.hangs = {hashes[4]}
        cached = (await prefill(bench, request)).cached
        assert cached in (CachedTokens(memory=64), CachedTokens(memory=80))
        assert bench.runner.num_computed == 200 - cached.total


@pytest.mark.parametrize("stage", ["head start", "computing"])
async def test_a_cancel_while_blocks_are_loaded_frees_them_all(stage: str) -> None:
    async with prefill_bench(num_blocks=16) as bench:
        request = make_request(200)
        hashes = hashes_of(request)
        bench.store.tiers = dict.fromkeys(hashes, Tier.MEMORY)
        bench.store.hangs = {hashes[9]}
        if stage == "computing":
            await measure(bench)
            bench.runner.gate.clear()
        reading = asyncio.create_task(prefill(bench, request))
        await (bench.runner.entered if stage == "computing" else bench.store.entered).wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        bench.runner.gate.set()
        await bench.settled()


async def test_a_store_that_cannot_be_asked_is_counted_apart_from_one_that_has_nothing() -> None:
    async with prefill_bench() as bench:
        bench.store.fails = True
        await prefill(bench, make_request(200))
        assert outcomes(bench) == {"failed": 1}
