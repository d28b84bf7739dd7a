"""Requests that end in every way there is, over real gRPC: nothing stays held, and callers hear why."""

import asyncio
import dataclasses
import threading
import time
from typing import Any

import grpc
import pytest

from kvrelay.errors import (
    BadLogitsError,
    CancelledError,
    CorruptBlockError,
    DeadlineError,
    DuplicateRequestError,
    InvalidRequestError,
    KVRelayError,
    NeverFitsError,
    NotFoundError,
    OverloadedError,
    PromptTooLongError,
    UnavailableError,
)
from kvrelay.messages import DecodeFinished, NodeRequest, ReservationGranted
from kvrelay.rpc.answers import AnswerEvents
from kvrelay.types import CachedTokens, FinishReason, ReservationId
from tests.support.decode_harness import Handoff, Harness, decode_node, hand_over, send
from tests.support.fake_engine import FakeRunner, make_request
from tests.support.manual_clock import ManualClock

PROMPT = tuple(range(10, 20))
REQUEST = make_request(PROMPT, max_tokens=20)


async def reserve(harness: Harness, request: NodeRequest = REQUEST) -> ReservationGranted:
    num_tokens = request.num_prompt_tokens + (request.sampling.max_tokens or 0)
    return await harness.client.reserve(request, num_tokens, timeout_s=30.0)


def messages(harness: Harness, granted: ReservationGranted, attempt: int = 0) -> list[bytes]:
    return Handoff(harness.node.info, REQUEST, granted, attempt).messages()


async def read_all(events: AnswerEvents) -> tuple[list[int], DecodeFinished]:
    token_ids: list[int] = []
    async for event in events:
        if isinstance(event, DecodeFinished):
            return token_ids, event
        token_ids.extend(token.token_id for token in event.tokens)
    raise AssertionError("the stream ended without DecodeFinished")


async def opened(harness: Harness) -> None:
    """Every reservation has its answer read, so that no lease can lapse."""
    while harness.node.reservations.next_deadline() is not None:  # the server runs in this very loop
        await asyncio.sleep(0)


class Gate:
    """Holds the engine inside a step until opened."""

    def __init__(self, runner: FakeRunner, after: int = 0) -> None:
        self._left = after
        self._entered, self._open = threading.Event(), threading.Event()
        runner.before_step = self._pass

    def _pass(self) -> None:
        if self._left > 0:
            self._left -= 1
            return
        self._entered.set()
        self._open.wait()

    async def reached(self) -> None:
        await asyncio.to_thread(self._entered.wait)

    def open(self) -> None:
        self._open.set()


# How many frames the sender gets through: BEGIN, two blocks, a tail, END.
FRAMES = {"granted": 0, "begun": 1, "receiving": 2, "all but END": 4, "computing": 0, "in the batch": 5}


async def test_a_reservation_that_comes_too_late_for_its_caller_is_given_back_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with decode_node(lease_s=60.0) as harness:
        grant, granted = harness.node.reserve, asyncio.Event()

        async def grant_late(*wanted: Any) -> ReservationGranted:
            given = await grant(*wanted)
            time.sleep(1.1)  # noqa: ASYNC251 - a busy interpreter: nobody hears yet that the call is over
            granted.set()
            return given

        monkeypatch.setattr(harness.node, "reserve", grant_late)
        async with asyncio.timeout(60.0):
            while not granted.is_set():  # a call may also end before the node has heard of it
                with pytest.raises(DeadlineError):
                    await harness.client.reserve(REQUEST, 30, timeout_s=1.0)
        await harness.all_free()


@pytest.mark.parametrize("ended_by", ["client leaves", "client vanishes", "Release"])
@pytest.mark.parametrize("stage", FRAMES)
async def test_a_request_that_ends_early_frees_all_it_held(stage: str, ended_by: str) -> None:
    runner = FakeRunner()
    gate = Gate(runner, after=2)
    async with decode_node(runner=runner, max_batch=2, max_batched_tokens=2) as harness:
        granted = await reserve(harness)
        call = harness.open_handoff()
        events = harness.client.decode(granted.reservation_id, compute_tail=stage == "computing")
        await opened(harness)
        for message in messages(harness, granted)[: FRAMES[stage]]:
            await send(call, message)
        if stage in ("computing", "in the batch"):
            await gate.reached()
        if ended_by == "client leaves":
            events.cancel()
        elif ended_by == "client vanishes":
            await harness.channel.close()
        else:
            await harness.client.release(granted.reservation_id)
        gate.open()
        counts = await harness.all_free()
        assert counts.free + counts.cached == 32
        events.cancel()
        call.cancel()


async def test_a_committed_answer_that_nobody_reads_is_freed_by_release() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        await hand_over(harness, messages(harness, granted))
        assert (await harness.counts()).held == 8
        await harness.client.release(granted.reservation_id)
        counts = await harness.all_free()
        assert (counts.free, counts.cached) == (30, 2)


async def test_a_request_that_ends_while_it_waits_for_a_row_frees_all_it_held() -> None:
    runner = FakeRunner()
    async with decode_node(runner=runner, max_batch=1) as harness:
        running, waiting = await reserve(harness), await reserve(harness)
        await hand_over(harness, messages(harness, waiting))
        gate = Gate(runner)
        first = harness.client.decode(running.reservation_id, compute_tail=True)
        await gate.reached()
        second = harness.client.decode(waiting.reservation_id)
        await opened(harness)
        second.cancel()
        gate.open()
        assert len((await read_all(first))[0]) == 20


async def test_a_cancelled_reserve_leaves_nothing_behind() -> None:
    runner = FakeRunner()
    async with decode_node(runner=runner, max_requests=8, lease_s=60.0) as harness:  # no lease lapses meanwhile
        granted = await reserve(harness)
        gate = Gate(runner)
        events = harness.client.decode(granted.reservation_id, compute_tail=True)
        await gate.reached()
        with pytest.raises(DeadlineError):
            await harness.client.reserve(REQUEST, 30, timeout_s=0.1)  # the engine is inside a step
        async with asyncio.timeout(60.0):
            while harness.node.status().num_slots_free < 7:  # the node has not seen the cancel yet
                await asyncio.sleep(0)
        gate.open()
        assert (await read_all(events))[1].reason is FinishReason.LENGTH


async def test_a_short_tail_is_computed_here() -> None:
    async with decode_node() as harness:
        for cached in (0, 8):
            granted = await reserve(harness)
            assert granted.num_cached_blocks * 4 == cached
            async with harness.client.decode(granted.reservation_id, compute_tail=True) as events:
                token_ids, finished = await read_all(events)
            assert token_ids == list(range(20, 40))
            assert (finished.reason, finished.cached) == (FinishReason.LENGTH, CachedTokens(device=cached))
            assert finished.compute_s > 0


async def test_blocks_that_answers_fill_are_offered_to_the_kvstore_once() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        async with harness.client.decode(granted.reservation_id, compute_tail=True) as events:
            token_ids, _ = await read_all(events)
        whole = dataclasses.replace(REQUEST, token_ids=(*PROMPT, *token_ids))
        hashes = Handoff(harness.node.info, whole, granted).sequence().block_hashes
        assert len(hashes) == 7  # of 30 tokens; the last token's KV is never computed
        assert harness.offered == hashes


async def test_tenants_share_nothing() -> None:
    ours, theirs = (dataclasses.replace(REQUEST, tenant_salt=salt) for salt in (b"ours", b"theirs"))
    async with decode_node() as harness:
        granted = await reserve(harness, ours)
        await hand_over(harness, Handoff(harness.node.info, ours, granted).messages())
        assert harness.registry.get_sample_value("kvrelay_handoff_blocks_received_total") == 3
        await harness.client.release(granted.reservation_id)
        for request, num_cached_blocks in ((ours, 2), (theirs, 0), (REQUEST, 0)):
            granted = await reserve(harness, request)
            assert granted.num_cached_blocks == num_cached_blocks
            await harness.client.release(granted.reservation_id)


async def test_blocks_of_another_tenant_are_refused() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness, dataclasses.replace(REQUEST, tenant_salt=b"ours"))
        theirs = Handoff(harness.node.info, dataclasses.replace(REQUEST, tenant_salt=b"theirs"), granted)
        with pytest.raises(CorruptBlockError, match="block 0 has hash"):
            await hand_over(harness, theirs.messages())
        await harness.client.release(granted.reservation_id)


async def test_requests_decode_side_by_side() -> None:
    async with decode_node(num_blocks=64, max_batch=3) as harness:

        async def one(first: int) -> list[int]:
            request = make_request((first, first + 1, first + 2), max_tokens=12)
            granted = await reserve(harness, request)
            async with harness.client.decode(granted.reservation_id, compute_tail=True) as events:
                return (await read_all(events))[0]

        answers = await asyncio.gather(*(one(first) for first in range(10, 80, 10)))
        assert answers == [[10 + (first + 3 + i - 10) % 80 for i in range(12)] for first in range(10, 80, 10)]


async def test_a_resumed_request_goes_on_where_it_was() -> None:
    resumed = make_request((*PROMPT, 20, 21, 22), max_tokens=5, num_prompt_tokens=10)
    async with decode_node() as harness:
        granted = await reserve(harness, resumed)
        async with harness.client.decode(granted.reservation_id, compute_tail=True) as events:
            assert await read_all(events) == ([23, 24], DecodeFinished(FinishReason.LENGTH, CachedTokens(), any_float))


class _AnyFloat(float):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, float)

    __hash__ = float.__hash__


any_float = _AnyFloat()


@pytest.mark.parametrize(
    ("request_", "num_tokens", "error", "message"),
    [
        (
            make_request(PROMPT, max_tokens=60),
            70,
            PromptTooLongError,
            "70 tokens of prompt and answer; the model takes 64",
        ),
        (make_request(PROMPT, max_tokens=54), 64, NeverFitsError, "16 KV blocks are needed; this node has 12 in all"),
        (make_request((10, 100)), 10, KVRelayError, r"token_ids holds 100; token ids are in \[0, 100\)"),
        (make_request(PROMPT, max_tokens=8), 17, KVRelayError, "num_tokens is 17; prompt and answer may take 18"),
        (make_request(PROMPT, temperature=float("nan")), 18, KVRelayError, "temperature"),
    ],
)
async def test_bad_reservations_are_refused_with_numbers(
    request_: NodeRequest, num_tokens: int, error: type[KVRelayError], message: str
) -> None:
    async with decode_node(num_blocks=12) as harness:
        with pytest.raises(error, match=message):
            await harness.client.reserve(request_, num_tokens, timeout_s=30.0)
        assert (await harness.counts()).free == 12


async def test_no_room_now_is_overloaded_and_later_there_is() -> None:
    async with decode_node(num_blocks=12) as harness:
        first = await reserve(harness)
        with pytest.raises(OverloadedError, match="8 more KV blocks are needed; 4 of 12 are available"):
            await reserve(harness)
        await harness.client.release(first.reservation_id)
        await harness.client.release(first.reservation_id)
        second = await reserve(harness)
        await harness.client.release(second.reservation_id)


async def test_too_many_requests_are_overloaded() -> None:
    async with decode_node(num_blocks=64, max_requests=2) as harness:
        granted = [await reserve(harness) for _ in range(2)]
        assert harness.node.status().num_slots_free == 0
        with pytest.raises(OverloadedError, match="2 requests hold blocks here; at most 2 may"):
            await reserve(harness)
        for one in granted:
            await harness.client.release(one.reservation_id)


async def test_reserves_that_wait_for_the_engine_count_too() -> None:
    runner = FakeRunner()
    async with decode_node(runner=runner, num_blocks=64, max_requests=3) as harness:
        gate = Gate(runner)
        granted = await reserve(harness)
        events = harness.client.decode(granted.reservation_id, compute_tail=True)
        await gate.reached()
        waiting = [asyncio.create_task(reserve(harness)) for _ in range(3)]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(OverloadedError, match="3 requests hold blocks here; at most 3 may"):
            await done.pop()
        gate.open()
        await read_all(events)
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            if isinstance(outcome, ReservationGranted):
                await harness.client.release(outcome.reservation_id)


async def test_a_lapsed_lease_frees_the_blocks_and_ends_the_stream() -> None:
    clock = ManualClock()
    async with decode_node(clock=clock) as harness:
        granted = await reserve(harness)
        call = harness.open_handoff()
        await send(call, messages(harness, granted)[0])
        clock.now += 9.0
        assert await harness.client.renew(granted.reservation_id) == 10.0
        clock.now += 9.0
        harness.node.expire_leases()
        assert (await harness.counts()).reserved == 8
        clock.now += 1.0
        harness.node.expire_leases()
        assert (await harness.all_free()).free == 32
        assert await call.code() == grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(NotFoundError, match="does not exist or has ended"):
            await harness.client.renew(granted.reservation_id)
        with pytest.raises(NotFoundError, match="does not exist or has ended"):
            await read_all(harness.client.decode(granted.reservation_id))
        assert harness.registry.get_sample_value("kvrelay_leases_lapsed_total") == 1


async def test_an_empty_reservation_id_is_called_that() -> None:
    nobody = ReservationId("")
    async with decode_node() as harness:
        for call in (harness.client.renew(nobody), read_all(harness.client.decode(nobody))):
            with pytest.raises(InvalidRequestError, match=r"^reservation id is empty$"):
                await call


async def test_leases_lapse_by_themselves() -> None:
    async with decode_node(lease_s=0.05) as harness:
        await reserve(harness)
        await reserve(harness)
        assert (await harness.all_free()).free == 32


async def test_an_answer_that_is_read_outlives_its_lease_and_a_committed_answer_nobody_reads_does_not() -> None:
    clock = ManualClock()
    async with decode_node(clock=clock) as harness:
        read = await reserve(harness)
        events = harness.client.decode(read.reservation_id)
        await opened(harness)
        unread = await reserve(harness)
        await hand_over(harness, messages(harness, unread))
        clock.now += 100.0
        harness.node.expire_leases()
        assert harness.node.reservations.ids == (read.reservation_id,)
        await hand_over(harness, messages(harness, read))
        assert (await read_all(events))[1].reason is FinishReason.LENGTH


async def test_a_second_reader_is_refused_and_the_first_goes_on() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        first = harness.client.decode(granted.reservation_id)
        await opened(harness)
        with pytest.raises(DuplicateRequestError, match="answer read already"):
            await read_all(harness.client.decode(granted.reservation_id))
        await hand_over(harness, messages(harness, granted))
        assert (await read_all(first))[0] == list(range(20, 40))


async def test_a_failing_step_ends_the_batch_with_an_error_and_the_node_serves_on() -> None:
    runner = FakeRunner()
    async with decode_node(runner=runner) as harness:
        granted = await reserve(harness)

        def fail() -> None:
            runner.before_step = lambda: None
            raise RuntimeError("NaN in the logits")

        runner.before_step = fail
        with pytest.raises(KVRelayError, match="a decode step failed: NaN in the logits") as raised:
            await read_all(harness.client.decode(granted.reservation_id, compute_tail=True))
        assert raised.value.code == "internal"
        assert (await harness.all_free()).free == 32
        again = await reserve(harness)
        assert len((await read_all(harness.client.decode(again.reservation_id, compute_tail=True)))[0]) == 20


async def test_a_dead_engine_fails_everyone_and_the_node_is_not_ready(caplog: pytest.LogCaptureFixture) -> None:
    """It dies of its own books, as soon as it is idle and finds that they do not balance."""
    async with decode_node() as harness:
        harness.engine_dies = True
        waiting, running = await reserve(harness), await reserve(harness)
        events = harness.client.decode(waiting.reservation_id)
        await harness.node.engine.call(lambda core: harness.pool._free.pop())
        last = harness.client.decode(running.reservation_id, compute_tail=True)
        with pytest.raises(UnavailableError, match="engine has died"):
            await read_all(events)
        last.cancel()
        assert "the engine thread failed" in caplog.text
        status = harness.node.status()
        assert (status.ready, status.not_ready_reason) == (False, "the engine has died")
        assert len(harness.node.reservations) == 0
        with pytest.raises(UnavailableError, match="not ready: the engine has died; reserve on another"):
            await reserve(harness)


async def test_a_draining_node_takes_nothing_new_and_ends_when_the_last_answer_has() -> None:
    runner = FakeRunner()
    async with decode_node(runner=runner) as harness:
        gate = Gate(runner, after=3)
        granted = await reserve(harness)
        events = harness.client.decode(granted.reservation_id, compute_tail=True)
        await gate.reached()
        draining = asyncio.create_task(harness.node.drain(10.0))
        await asyncio.sleep(0)
        assert dataclasses.astuple(harness.node.status())[:2] == (False, True)
        assert harness.node.status().not_ready_reason == "draining"
        with pytest.raises(UnavailableError, match="draining"):
            await reserve(harness)
        assert not draining.done()
        gate.open()
        assert len((await read_all(events))[0]) == 20
        await draining


async def test_what_does_not_end_in_the_grace_period_is_dropped_as_unavailable() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        events = harness.client.decode(granted.reservation_id)
        await opened(harness)
        await harness.node.drain(0.0)
        with pytest.raises(UnavailableError, match="shutting down"):
            await read_all(events)


async def test_status_counts_blocks_rows_and_reservations() -> None:
    runner = FakeRunner()
    async with decode_node(runner=runner, max_batch=1) as harness:
        gate = Gate(runner, after=1)
        first, second, third = [await reserve(harness) for _ in range(3)]
        running = harness.client.decode(first.reservation_id, compute_tail=True)
        await gate.reached()
        status = harness.node.status()
        assert (status.ready, status.num_running, status.num_reservations, status.num_slots_free) == (True, 1, 2, 5)
        assert (status.blocks.held, status.blocks.reserved) == (8, 16)
        gate.open()
        await read_all(running)
        for one in (second, third):
            await harness.client.release(one.reservation_id)
        sample, num_steps = harness.registry.get_sample_value, len(runner.batches)
        assert sample("kvrelay_decode_tokens_generated_total") == 20
        assert sample("kvrelay_decode_tokens_computed_total") == sum(map(sum, runner.batches))
        assert sample("kvrelay_decode_step_seconds_count") == num_steps
        assert sample("kvrelay_decode_batch_rows_sum") == num_steps


async def test_cancelling_on_the_client_raises_there() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        events = harness.client.decode(granted.reservation_id)
        reading = asyncio.create_task(read_all(events))
        await opened(harness)
        events.cancel()
        with pytest.raises(CancelledError):
            await reading


async def test_a_stuck_engine_gives_every_request_up_and_frees_it_when_it_moves_again() -> None:
    clock = ManualClock()
    async with decode_node(clock=clock) as harness:
        assert isinstance(harness.runner, FakeRunner)
        gate = Gate(harness.runner, after=2)
        granted = await reserve(harness)
        answer = asyncio.create_task(read_all(harness.client.decode(granted.reservation_id, compute_tail=True)))
        await gate.reached()
        clock.now += 9.5
        harness.node.end_if_stuck()
        assert harness.node.status().num_slots_free == 7
        clock.now += 1.0
        harness.node.end_if_stuck()
        with pytest.raises(UnavailableError, match="engine is stuck; resume on another"):
            await asyncio.wait_for(answer, 60.0)
        with pytest.raises(UnavailableError, match="engine is stuck; reserve on another"):
            await reserve(harness)
        gate.open()


async def test_bad_logits_end_one_answer_of_a_batch_with_their_code() -> None:
    async with decode_node() as harness:
        runner = harness.runner
        assert isinstance(runner, FakeRunner)
        runner.bad_after = {45}
        answers = []
        for first in (10, 30):
            request = make_request(tuple(range(first, first + 10)), max_tokens=20)
            granted = await reserve(harness, request)
            events = harness.client.decode(granted.reservation_id, compute_tail=True, timeout_s=60.0)
            answers.append(asyncio.create_task(read_all(events)))
        token_ids, finished = await answers[0]
        assert (token_ids, finished.reason) == (list(range(20, 40)), FinishReason.LENGTH)
        with pytest.raises(BadLogitsError) as failed:
            await answers[1]
        assert (failed.value.code, failed.value.retryable) == ("bad_logits", False)
