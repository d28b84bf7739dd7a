"""Continuous batching: who runs how much, whatever comes and goes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node.scheduler import Restored, Scheduler
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import InvalidRequestError
from kvrelay.limits import DecodeLimits
from kvrelay.types import BlockHash, BlockId
from tests.support.fake_engine import make_request


class EndlessMemory:
    """There is always another block."""

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        return True

    def restore(self, sequence: Sequence) -> Restored:
        raise AssertionError("nobody was preempted")

    def drop(self, sequence: Sequence) -> None:
        raise AssertionError("nobody has to give way")


def make_sequence(num_uncomputed: int) -> Sequence:
    sequence = Sequence.create(make_request(tuple(range(num_uncomputed + 3))), BlockHash(bytes(32)), 4)
    sequence.num_computed_tokens = 3
    sequence.block_table = [BlockId(0)]
    return sequence


def step(scheduler: Scheduler) -> list[tuple[Sequence, int]]:
    rows = [(row.sequence, row.num_tokens) for row in scheduler.schedule(EndlessMemory()).batch.rows]
    for sequence, num_tokens in rows:
        sequence.num_computed_tokens += num_tokens
        if sequence.num_uncomputed == 0:
            sequence.append(1)
    return rows


def test_sequences_join_in_order_as_rows_become_free() -> None:
    scheduler = Scheduler(DecodeLimits(max_batch=2, max_batched_tokens=8))
    first, second, third = (make_sequence(1) for _ in range(3))
    for sequence in (first, second, third):
        scheduler.add(sequence)
    assert step(scheduler) == [(first, 1), (second, 1)]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert scheduler.remove(first)
    assert step(scheduler) == [(second, 1), (third, 1)]


def test_tokens_that_wait_are_those_of_prompts_beyond_their_last() -> None:
    scheduler = Scheduler(DecodeLimits(max_batch=4, max_batched_tokens=8))
    for num_uncomputed in (1, 9):
        scheduler.add(make_sequence(num_uncomputed))
    assert scheduler.num_waiting_tokens == 8
    step(scheduler)
    assert scheduler.num_waiting_tokens == 1
    step(scheduler)
    assert scheduler.num_waiting_tokens == 0


def test_a_prompts_tail_takes_what_the_budget_leaves_and_decodes_go_on() -> None:
    scheduler = Scheduler(DecodeLimits(max_batch=4, max_batched_tokens=8))
    decode, tail, later = make_sequence(1), make_sequence(9), make_sequence(4)
    for sequence in (decode, tail, later):
        scheduler.add(sequence)
    assert step(scheduler) == [(decode, 1), (tail, 6), (later, 1)]
    assert step(scheduler) == [(decode, 1), (tail, 3), (later, 3)]
    assert step(scheduler) == [(decode, 1), (tail, 1), (later, 1)]


def test_one_can_leave_while_it_waits_or_runs_and_only_once() -> None:
    scheduler = Scheduler(DecodeLimits(max_batch=1, max_batched_tokens=1))
    running, waiting = make_sequence(1), make_sequence(1)
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.schedule(EndlessMemory())
    assert scheduler.remove(waiting)
    assert not scheduler.remove(waiting)
    assert scheduler.remove(running)
    assert not scheduler.has_work()


@pytest.mark.parametrize(("max_batch", "budget"), [(0, 4), (5, 4)])
def test_a_budget_under_one_token_a_row_is_refused(max_batch: int, budget: int) -> None:
    with pytest.raises(InvalidRequestError, match="max_batch"):
        Scheduler(DecodeLimits(max_batch, budget))


@given(
    max_batch=st.integers(1, 6),
    extra_budget=st.integers(0, 10),
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), max_size=20),
    leavers=st.lists(st.integers(0, 19), max_size=10),
)
def test_limits_hold_order_holds_and_nobody_starves(
    max_batch: int, extra_budget: int, arrivals: list[tuple[int, int]], leavers: list[int]
) -> None:
    budget = max_batch + extra_budget
    scheduler = Scheduler(DecodeLimits(max_batch, budget))
    sequences = [make_sequence(num_uncomputed) for _, num_uncomputed in arrivals]
    alive: list[Sequence] = []
    steps_left = {id(s): 4 for s in sequences}
    pending = list(zip((pause for pause, _ in arrivals), sequences, strict=True))
    while pending or alive:
        while pending and pending[0][0] == 0:
            alive.append(pending[0][1])
            scheduler.add(pending.pop(0)[1])
        if pending:
            pending[0] = (pending[0][0] - 1, pending[0][1])
        assert scheduler.has_work() == bool(alive)
        rows = step(scheduler)
        assert [s for s, _ in rows] == alive[:max_batch], "the oldest run, each of them, in order"
        assert all(num_tokens >= 1 for _, num_tokens in rows)
        assert sum(num_tokens for _, num_tokens in rows) <= budget
        used = sum(num_tokens for _, num_tokens in rows)
        assert used == budget or all(s.num_uncomputed == 1 for s, _ in rows), "budget is left only if nobody wants it"
        for sequence, _ in rows:
            steps_left[id(sequence)] -= 1
        gone = [s for s in alive if steps_left[id(s)] == 0]
        if leavers and alive and leavers[-1] < len(alive):
            gone.append(alive[leavers.pop()])
        for sequence in gone:
            assert scheduler.remove(sequence) == (sequence in alive)
            if sequence in alive:
                alive.remove(sequence)
    assert not scheduler.has_work()
