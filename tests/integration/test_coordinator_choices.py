"""Several answers to one prompt over real gRPC with fake nodes: what a client sees, and that nothing is left behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from kvrelay.client import Client
from kvrelay.errors import (
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    KVRelayError,
    OverloadedError,
    UnavailableError,
)
from kvrelay.inference import ChoiceFinished, RequestFinished, TokensGenerated, Usage
from kvrelay.pb import inference_pb2, inference_pb2_grpc, types_pb2
from kvrelay.sampling import fork_seed
from kvrelay.types import CachedTokens, FinishReason
from tests.support.choices import Choices, collect_choices
from tests.support.coordinator_ends import TIMEOUT_S, Ends, ends, greedy, long_prompt
from tests.support.fake_nodes import ANSWER_IDS, ANSWER_TEXT, Stage

WAIT_S = 2.0  # for room: what finds some at once is not to be late on a busy machine
SHORT = greedy(max_tokens=40)  # takes 9 blocks of a decode node


async def ask_for(cluster: Ends, n: int, **kwargs: Any) -> Choices:
    sampling = kwargs.pop("sampling", greedy(seed=7))
    events = cluster.client.generate(long_prompt(), sampling, n=n, **kwargs)
    return await asyncio.wait_for(collect_choices(events), TIMEOUT_S)


def find_prompt_cached(cluster: Ends) -> None:
    """From now on, as after a first answer: 96 of the prompt's 100 tokens lie on every decode node."""
    for node in cluster.decode:
        node.num_cached_blocks = 6


async def first_answer_at_work(cluster: Ends, n: int, **kwargs: Any) -> asyncio.Task[Choices]:
    """A request whose first answer waits for its first token."""
    cluster.decode[0].at["token"].hold()
    asked = asyncio.create_task(ask_for(cluster, n, **kwargs))
    await cluster.decode[0].until_reached("token")
    return asked


async def all_at_work(cluster: Ends, n: int, **kwargs: Any) -> asyncio.Task[Choices]:
    """A request whose first answer waits to be told that it is complete, and the others for their first tokens."""
    cluster.decode[0].at["finish"].hold()
    asked = await first_answer_at_work(cluster, n, **kwargs)
    find_prompt_cached(cluster)
    cluster.decode[0].at["token"].let_go()
    await cluster.decode[0].until_reached("finish", times=n)
    return asked


async def test_each_answer_is_whole_and_draws_with_its_own_seed() -> None:
    async with ends() as cluster:
        cluster.prefill[0].cached = CachedTokens(device=16)
        asked = await first_answer_at_work(cluster, 3)
        find_prompt_cached(cluster)
        cluster.decode[0].at["token"].let_go()
        outcome = await asked
        assert [outcome.token_ids(index) for index in range(3)] == [ANSWER_IDS] * 3
        assert outcome.texts == dict.fromkeys(range(3), ANSWER_TEXT)
        assert outcome.ends == {index: ChoiceFinished(index, FinishReason.STOP, "", 45) for index in range(3)}
        assert outcome.accepted.seed == 7
        seeds = [request.sampling.seed for request in cluster.decode[0].requests]
        assert seeds[0] == 7
        assert set(seeds[1:]) == {fork_seed(7, 1), fork_seed(7, 2)}
        ids = {request.request_id for request in cluster.decode[0].requests}
        assert len(ids) == 3, "nodes tell requests apart by their ids"


async def test_one_account_for_all_of_them() -> None:
    """The prompt and what was cached of it count once, as the first answer found them."""
    async with ends() as cluster:
        cluster.prefill[0].cached = CachedTokens(device=16)
        asked = await first_answer_at_work(cluster, 3)
        find_prompt_cached(cluster)
        cluster.decode[0].at["token"].let_go()
        finished = (await asked).finished
        assert finished is not None
        assert finished.usage == Usage(100, 3 * 45, CachedTokens(device=16))
        assert (finished.reason, finished.retries, finished.handoff_bytes) == (FinishReason.STOP, 0, 4096)
        assert finished.prefill_node == cluster.prefill[0].address
        assert len(cluster.prefill[0].requests) == 1, "the others find the prompt on the decode node"
        assert cluster.metric("kvrelay_prompt_tokens_total") == 100
        assert cluster.metric("kvrelay_cached_prompt_tokens_total", tier="device") == 16
        assert cluster.metric("kvrelay_generation_tokens_total") == 3 * 45
        assert cluster.metric("kvrelay_inter_token_latency_seconds_count") == 3 * 44
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
            assert cluster.metric(f"kvrelay_{name}_seconds_count") == 1, name
        assert cluster.metric("kvrelay_request_success_total", reason="stop") == 3
        for edge in ("accepted", "finished"):
            assert cluster.metric("kvrelay_request_edges_total", edge=edge) == 3


async def test_the_others_wait_for_the_first_ones_first_token() -> None:
    async with ends() as cluster:
        asked = await first_answer_at_work(cluster, 3)
        await cluster.until_status(lambda status: (status.num_running, status.num_queued) == (1, 0))
        assert len(cluster.decode[0].requests) == 1
        cluster.decode[0].at["token"].let_go()
        assert set((await asked).ends) == {0, 1, 2}


@pytest.mark.parametrize("n", [None, 0, 1])
async def test_one_answer_has_no_event_of_its_own_end(n: int | None) -> None:
    """What clients that do not know of several see has not changed."""
    async with ends() as cluster, grpc.aio.insecure_channel(cluster.address) as channel:
        sampling = types_pb2.SamplingParams(temperature=0.0, max_tokens=4)
        request = inference_pb2.GenerateRequest(text="hello", sampling=sampling, n=n)
        events = [event async for event in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=10)]
        kinds = [event.WhichOneof("event") for event in events]
        assert set(kinds) == {"accepted", "tokens", "finished"}
        assert {event.tokens.index for event in events if event.WhichOneof("event") == "tokens"} == {0}
        assert len(cluster.decode[0].requests) == 1


@pytest.mark.parametrize("max_tokens", [1, 100])
async def test_an_answer_may_end_with_its_first_token(max_tokens: int) -> None:
    async with ends() as cluster:
        outcome = await ask_for(cluster, 3, sampling=greedy(max_tokens=max_tokens, stop=("T",)))
        assert [outcome.token_ids(index) for index in range(3)] == [ANSWER_IDS[:1]] * 3
        assert outcome.ends == {index: ChoiceFinished(index, FinishReason.STOP, "T", 1) for index in range(3)}
        assert outcome.finished is not None
        assert (outcome.finished.stop_string, outcome.finished.usage.completion_tokens) == ("T", 3)


async def test_stop_strings_and_logprobs_are_each_answers_own() -> None:
    async with ends() as cluster:
        outcome = await ask_for(cluster, 2, sampling=greedy(stop=(" 42,",), logprobs=2))
        for index in range(2):
            assert outcome.texts[index] == "The answer is"
            assert outcome.ends[index] == ChoiceFinished(index, FinishReason.STOP, " 42,", 17)
            chosen = [token.logprobs.chosen.logprob for token in outcome.tokens[index] if token.logprobs]
            assert chosen == [-1.0 - number for number in range(17)]


async def test_with_room_for_one_at_a_time_they_come_one_after_another() -> None:
    async with ends(blocks=10) as cluster:
        outcome = await ask_for(cluster, 4, sampling=SHORT)
        assert [outcome.token_ids(index) for index in range(4)] == [ANSWER_IDS[:40]] * 4
        assert cluster.decode[0].max_reserved == 9


async def test_the_others_go_before_requests_that_came_later() -> None:
    async with ends(blocks=10) as cluster:
        asked = await first_answer_at_work(cluster, 3, sampling=SHORT, request_id="several")
        later = asyncio.create_task(cluster.ask(sampling=SHORT, request_id="later"))
        await cluster.until_queued(1)
        cluster.decode[0].at["token"].let_go()
        await asyncio.gather(asked, later)
        order = [request.request_id.partition("#")[0] for request in cluster.decode[0].requests]
        assert order == ["several"] * 3 + ["later"]


async def test_each_answer_has_a_place_in_the_queue_from_the_start() -> None:
    async with ends(blocks=10, max_queue=3) as cluster:
        asked = await first_answer_at_work(cluster, 3, sampling=SHORT)
        with pytest.raises(OverloadedError, match="2 answers wait already, and 2 more would be over the 3") as refused:
            await ask_for(cluster, 2, sampling=SHORT)
        assert refused.value.retry_after_s >= 1.0
        later = asyncio.create_task(cluster.ask(sampling=SHORT))
        await cluster.until_queued(1)
        with pytest.raises(OverloadedError, match="3 answers wait already"):
            await cluster.ask(sampling=SHORT)
        cluster.decode[0].at["token"].let_go()
        await asyncio.gather(asked, later)
        assert (await ask_for(cluster, 3, sampling=SHORT)).finished, "every place is free again"


async def test_more_than_the_queue_can_ever_hold_is_the_clients_mistake() -> None:
    async with ends(max_queue=3) as cluster:
        with pytest.raises(InvalidRequestError, match="n is 4; allowed is at most 3 here"):
            await ask_for(cluster, 4)


@pytest.mark.parametrize("how", ["call", "rpc"])
@pytest.mark.parametrize("when", ["first at work", "all at work", "others queued"])
async def test_cancel_ends_them_all(when: str, how: str) -> None:
    async with ends(blocks=10 if when == "others queued" else 40, max_queue=3) as cluster:
        if when == "all at work":
            asked = await all_at_work(cluster, 3, sampling=SHORT, request_id="doomed")
        else:
            asked = await first_answer_at_work(cluster, 3, sampling=SHORT, request_id="doomed")
        if when == "others queued":
            cluster.decode[0].at["finish"].hold()
            cluster.decode[0].at["token"].let_go()
            await cluster.until_queued(2)
        if how == "call":
            asked.cancel()
        else:
            await cluster.client.cancel("doomed")
        with pytest.raises((asyncio.CancelledError, CancelledError)):
            await asked
        await cluster.check_idle()
        num_begun = 1 if when == "first at work" else 3
        assert cluster.metric("kvrelay_request_edges_total", edge="cancelled") == num_begun
        assert cluster.metric("kvrelay_request_edges_total", edge="accepted") == num_begun
        assert cluster.metric("kvrelay_errors_total", code="cancelled") == 1
        for stage in ("token", "finish"):
            cluster.decode[0].at[stage].let_go()
        assert (await ask_for(cluster, 3, sampling=SHORT)).finished, "every place is free again"


async def test_a_client_that_leaves_between_two_answers_ends_the_rest() -> None:
    async with ends(blocks=10) as cluster:
        async with aclosing(cluster.client.generate(long_prompt(), SHORT, n=3)) as events:
            async for event in events:
                if isinstance(event, ChoiceFinished):
                    break
        await cluster.check_idle()


@pytest.mark.parametrize("failure", [InvalidRequestError("no, never"), OverloadedError("not one more")])
async def test_an_answer_that_fails_ends_the_request_with_one_error(failure: KVRelayError) -> None:
    """Here the second one to ask for room; refused for too long, or for ever."""
    async with ends(max_queue_wait_s=WAIT_S) as cluster:
        cluster.decode[0].at["finish"].hold()
        cluster.decode[0].at["reserve"].failures = [None, *[failure] * 1_000]
        with pytest.raises(type(failure)) as failed:
            await ask_for(cluster, 3, request_id="doomed")
        assert failed.value.retryable == failure.retryable
        await cluster.check_idle()
        assert cluster.metric("kvrelay_errors_total", code=failure.code) == 1
        assert cluster.metric("kvrelay_request_edges_total", edge="failed") == 3
        cluster.decode[0].at["reserve"].failures = []
        cluster.decode[0].at["finish"].let_go()
        assert (await ask_for(cluster, 3, request_id="doomed")).finished, "its id and its places are free again"


async def test_a_first_answer_that_fails_takes_the_others_with_it() -> None:
    async with ends(max_queue=3) as cluster:
        cluster.prefill[0].at["compute"].failures = [InvalidRequestError("no, never")]
        with pytest.raises(InvalidRequestError, match="no, never"):
            await ask_for(cluster, 3)
        assert len(cluster.decode[0].requests) == 1
        assert cluster.metric("kvrelay_request_edges_total", edge="accepted") == 1
        assert (await ask_for(cluster, 3)).finished, "every place is free again"


class Halfway(Stage):
    """Lets each answer have `num_tokens` tokens and no more."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.hold()
        self._num_tokens = num_tokens
        self._passes: Counter[asyncio.Task[Any] | None] = Counter()

    async def pass_through(self) -> None:
        call = asyncio.current_task()
        self._passes[call] += 1
        if self._passes[call] > self._num_tokens:
            await super().pass_through()


async def test_a_decode_node_that_dies_is_left_by_each_answer_on_its_own() -> None:
    """Each goes on where it was, with its seed: nothing is lost, repeated or changed."""
    async with ends(num_decode=2, blocks=40) as cluster:
        victim, other = cluster.decode
        other.ready = False
        other.tell()
        await cluster.until_status(lambda status: sum(report.status.ready for report in status.nodes) == 2)
        victim.at["token"] = Halfway(10)
        asked = asyncio.create_task(ask_for(cluster, 3))
        await cluster.until_status(lambda _: cluster.metric("kvrelay_generation_tokens_total") == 30)
        other.ready = True
        other.tell()
        await cluster.until_status(lambda status: all(report.status.ready for report in status.nodes))
        await victim.kill()
        outcome = await asked
        assert [outcome.token_ids(index) for index in range(3)] == [ANSWER_IDS] * 3
        assert outcome.finished is not None
        assert (outcome.finished.retries, outcome.finished.usage.completion_tokens) == (3, 3 * 45)
        assert {len(request.token_ids) for request in other.requests} == {110}
        seeds = {request.sampling.seed for request in other.requests}
        assert seeds == {request.sampling.seed for request in victim.requests}
        assert seeds == {fork_seed(7, index) for index in range(3)}


async def test_drain_waits_for_answers_that_have_not_begun() -> None:
    async with ends() as cluster:
        asked = await first_answer_at_work(cluster, 3)
        draining = asyncio.create_task(cluster.app.drain(10.0))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="draining"):
            await cluster.ask()
        cluster.decode[0].at["token"].let_go()
        assert set((await asked).ends) == {0, 1, 2}
        await draining


async def test_drain_that_ends_what_runs_ends_them_all() -> None:
    async with ends(blocks=40) as cluster:
        asked = await all_at_work(cluster, 3, sampling=SHORT)
        await cluster.app.drain(0.1)
        with pytest.raises(UnavailableError, match="shutting down"):
            await asked


async def test_longest_life_is_of_them_all() -> None:
    async with ends(request_timeout_s=0.5) as cluster:
        cluster.decode[0].at["finish"].hold()
        with pytest.raises(DeadlineError, match=r"longer than 0\.5 s"):
            await ask_for(cluster, 3)


async def test_many_requests_for_several_at_once() -> None:
    async with ends(num_prefill=2, num_decode=2, blocks=40) as cluster:
        outcomes = await asyncio.gather(*(ask_for(cluster, 1 + number % 4) for number in range(16)))
        for number, outcome in enumerate(outcomes):
            assert {outcome.token_ids(index) for index in range(1 + number % 4)} == {ANSWER_IDS}
        assert cluster.metric("kvrelay_e2e_request_latency_seconds_count") == 16
        assert cluster.metric("kvrelay_request_success_total", reason="stop") == 4 * (1 + 2 + 3 + 4)


async def test_the_blocking_client_gives_indexes() -> None:
    def use(address: str) -> tuple[set[int], list[int], bool]:
        with Client(address) as client:
            events = list(client.generate(long_prompt(), greedy(), n=2))
            indexes = {event.index for event in events if isinstance(event, TokensGenerated)}
            complete = sorted(event.index for event in events if isinstance(event, ChoiceFinished))
            return indexes, complete, isinstance(events[-1], RequestFinished)

    async with ends() as cluster:
        assert await asyncio.to_thread(use, cluster.address) == ({0, 1}, [0, 1], True)
