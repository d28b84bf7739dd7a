"""A log of events that many read, each from the first one on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from coordinator.event_log import EventLog
from coordinator.outbox import MAX_EVENT_TOKENS
from coordinator.token_columns import TokenColumns
from kvrelay.inference import (
    GenerateEvent,
    RequestAccepted,
    RequestFailed,
    TokensGenerated,
)
from kvrelay.rpc.convert_inference import generate_event_to_pb
from kvrelay.sampling import GeneratedToken, StepLogprobs, TokenLogprob
from tests.support.answer_events import ACCEPTED, complete, drained, tokens

FAILED = RequestFailed("cancelled", "gone", retryable=False)


async def test_every_reader_gets_everything_from_the_first_event_on() -> None:
    log = EventLog()
    for event in (ACCEPTED, tokens(0, 97), tokens(1, 65), complete(1), tokens(0, 98), complete(0), FAILED):
        log.put(event)
    expected = [ACCEPTED, tokens(0, 97, 98), complete(0), tokens(1, 65), complete(1), FAILED]
    assert await drained(log) == expected
    assert await drained(log) == expected


async def test_one_who_reads_along_gets_each_event_as_it_was() -> None:
    log = EventLog()
    events = log.events()
    for event in (ACCEPTED, tokens(0, 97), tokens(0, 98, 99), TokensGenerated((), "!"), FAILED):
        log.put(event)
        assert await asyncio.wait_for(anext(events), 10.0) == event


async def test_readers_that_wait_hear_of_what_comes_and_one_that_leaves_is_not_missed() -> None:
    log = EventLog()
    log.put(ACCEPTED)
    readers = [asyncio.create_task(drained(log)) for _ in range(3)]
    await asyncio.sleep(0)
    readers[1].cancel()
    await asyncio.gather(readers[1], return_exceptions=True)
    log.put(tokens(0, 97))
    log.put(FAILED)
    for reader in (readers[0], readers[2]):
        assert await asyncio.wait_for(reader, 10.0) == [ACCEPTED, tokens(0, 97), FAILED]


async def test_no_event_of_a_long_answer_is_too_large_for_a_client() -> None:
    log, logprob = EventLog(), TokenLogprob(49_151, -12.5)
    token = GeneratedToken(49_151, StepLogprobs(logprob, (logprob,) * 20))
    for _ in range(2_500):
        log.put(TokensGenerated((token,), "word ", 0))
    log.put(FAILED)
    *events, failed = await drained(log)
    assert failed == FAILED
    assert [len(event.tokens) for event in events if isinstance(event, TokensGenerated)] == [1_000, 1_000, 500]
    assert max(generate_event_to_pb(event).ByteSize() for event in events) < 2**20
    assert "".join(event.text for event in events if isinstance(event, TokensGenerated)) == "word " * 2_500
    assert {one for event in events if isinstance(event, TokensGenerated) for one in event.tokens} == {token}


async def test_bytes_are_those_of_ids_text_and_logprobs() -> None:
    log = EventLog()
    log.put(ACCEPTED)
    assert log.num_bytes == 0
    log.put(tokens(0, 97, 98))
    assert log.num_bytes == 2 * 4 + 2
    log.put(TokensGenerated((), "語"))
    assert log.num_bytes == 10 + 4
    top = (TokenLogprob(5, -1.0), TokenLogprob(6, -2.0))
    log.put(TokensGenerated((GeneratedToken(5, StepLogprobs(top[0], top)),), ""))
    assert log.num_bytes == 14 + 4 + 5 + 2 * 8


def test_columns_give_back_what_was_put_in() -> None:
    first = GeneratedToken(5, StepLogprobs(TokenLogprob(5, -0.5), (TokenLogprob(5, -0.5), TokenLogprob(9, -1.25))))
    second = GeneratedToken(2**32 - 1, StepLogprobs(TokenLogprob(2**32 - 1, -3.0), ()))
    third = GeneratedToken(0, StepLogprobs(TokenLogprob(0, -0.0), (TokenLogprob(1, -8.0),)))
    columns = TokenColumns()
    columns.extend((first, second))
    columns.extend((third,))
    assert columns.since(0) == (first, second, third)
    assert columns.since(1) == (second, third)
    assert columns.since(3) == ()


class Reading:
    """A reader that takes events one at a time, and what it has of each answer so far."""

    def __init__(self, log: EventLog) -> None:
        self.events: AsyncIterator[GenerateEvent] = log.events()
        self.seen: list[GenerateEvent] = []
        self.next: asyncio.Task[GenerateEvent] | None = None

    async def step(self) -> None:
        """Takes an event if there is one by the time that all who could go on did."""
        if self.next is None:
            self.next = asyncio.create_task(anext(self.events))  # type: ignore[arg-type]
        for _ in range(5):
            await asyncio.sleep(0)
        if self.next.done():
            self.seen.append(self.next.result())
            self.next = None

    async def leave(self) -> None:
        if self.next is not None:
            self.next.cancel()
            await asyncio.gather(self.next, return_exceptions=True)

    def check(self, given: dict[int, list[int]]) -> None:
        """What was read is the beginning of what was put."""
        assert self.seen[:1] in ([], [ACCEPTED])
        assert not any(isinstance(event, RequestAccepted) for event in self.seen[1:])
        for index, token_ids in given.items():
            mine = [event for event in self.seen if isinstance(event, TokensGenerated) and event.index == index]
            got = [token.token_id for event in mine for token in event.tokens]
            assert got == token_ids[: len(got)]
            assert "".join(event.text for event in mine) == "".join(map(chr, got))
            assert all(0 < len(event.tokens) <= MAX_EVENT_TOKENS for event in mine)


STEPS = st.one_of(
    st.tuples(st.just("emit"), st.integers(0, 2), st.lists(st.integers(1, 99), min_size=1, max_size=3)),
    st.tuples(st.sampled_from(("attach", "read", "leave")), st.integers(0, 4), st.just([])),
)


@given(st.lists(STEPS, max_size=40))
def test_whoever_comes_and_goes_each_reads_a_beginning_and_who_stays_the_whole(
    steps: list[tuple[str, int, list[int]]],
) -> None:
    async def scenario() -> None:
        log, given_ids, readers = EventLog(), dict[int, list[int]](), list[Reading]()
        log.put(ACCEPTED)
        for what, number, token_ids in steps:
            if what == "emit":
                log.put(tokens(number, *token_ids))
                given_ids.setdefault(number, []).extend(token_ids)
            elif what == "attach":
                readers.append(Reading(log))
            elif readers and what == "read":
                await readers[number % len(readers)].step()
            elif readers:
                gone = readers.pop(number % len(readers))
                await gone.leave()
                gone.check(given_ids)
        for index in given_ids:
            log.put(complete(index))
        log.put(FAILED)
        for reader in [*readers, Reading(log)]:
            while FAILED not in reader.seen:
                await reader.step()
            reader.check(given_ids)
            for index, ids in given_ids.items():
                mine = [event for event in reader.seen if getattr(event, "index", None) == index]
                assert mine[-1] == complete(index)
                assert sum(len(event.tokens) for event in mine if isinstance(event, TokensGenerated)) == len(ids)

    asyncio.run(scenario())
