"""What waits for a slow client: few events of tokens an answer, none too large, and all in their answer's order."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from coordinator.outbox import Outbox
from kvrelay.inference import (
    GenerateEvent,
    RequestFailed,
    TokensGenerated,
)
from kvrelay.rpc.convert_inference import generate_event_to_pb
from kvrelay.sampling import GeneratedToken, StepLogprobs, TokenLogprob
from tests.support.answer_events import ACCEPTED, complete, drained, tokens

FAILED = RequestFailed("unavailable", "gone", retryable=True)


async def test_tokens_that_wait_are_put_together_for_each_answer() -> None:
    outbox = Outbox()
    for event in (
        ACCEPTED,
        tokens(0, 97),
        tokens(1, 65),
        tokens(0, 98),
        complete(0),
        tokens(1, 66, 67),
        complete(1),
        FAILED,
    ):
        outbox.put(event)
    assert await drained(outbox) == [
        ACCEPTED,
        tokens(0, 97, 98),
        tokens(1, 65, 66, 67),
        complete(0),
        complete(1),
        FAILED,
    ]


async def test_what_was_taken_is_not_added_to() -> None:
    outbox = Outbox()
    events = outbox.events()
    for token_id in (97, 98):
        outbox.put(tokens(0, token_id))
        assert await asyncio.wait_for(anext(events), 10.0) == tokens(0, token_id)
    outbox.put(FAILED)
    assert [event async for event in events] == [FAILED]


async def test_a_client_that_reads_nothing_costs_one_entry_an_answer() -> None:
    outbox = Outbox()
    for number in range(1_000):
        outbox.put(tokens(number % 4, 97))
    outbox.put(FAILED)
    events = await drained(outbox)
    assert len(events) == 5


async def test_no_event_of_a_long_answer_that_nobody_read_is_too_large_for_a_client() -> None:
    """gRPC's default limit is 4 MiB; events are to stay below 1 MiB."""
    outbox, logprob = Outbox(), TokenLogprob(49_151, -12.345678)
    token = GeneratedToken(49_151, StepLogprobs(logprob, (logprob,) * 20))
    for _ in range(20_000):
        outbox.put(TokensGenerated((token,), "word ", 0))
    outbox.put(FAILED)
    *events, failed = await drained(outbox)
    assert failed == FAILED
    assert len(events) == 20
    assert max(generate_event_to_pb(event).ByteSize() for event in events) < 2**20
    assert sum(len(event.tokens) for event in events if isinstance(event, TokensGenerated)) == 20_000


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99), st.booleans()), max_size=60))
def test_each_answers_tokens_come_in_order_whenever_they_are_read(steps: list[tuple[int, int, bool]]) -> None:
    async def scenario() -> None:
        outbox, given_ids, seen_ids = Outbox(), dict[int, list[int]](), dict[int, list[int]]()
        events = outbox.events()

        def see(event: GenerateEvent) -> None:
            if isinstance(event, TokensGenerated):
                seen_ids.setdefault(event.index, []).extend(token.token_id for token in event.tokens)

        for index, token_id, read in steps:
            outbox.put(tokens(index, token_id))
            given_ids.setdefault(index, []).append(token_id)
            if read:
                see(await anext(events))
        outbox.put(FAILED)
        async for event in events:
            see(event)
        assert seen_ids == given_ids

    asyncio.run(scenario())
