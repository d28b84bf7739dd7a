"""The chunk scheduler: budget, fairness between short and long prompts, admission order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidRequestError, OverloadedError
from kvrelay.limits import PrefillLimits
from prefill_node.scheduler import JobId, PrefillScheduler, share_budget

REMAINING = st.lists(st.integers(1, 5_000), max_size=12)
BUDGET = st.integers(1, 2_048)
CHUNK = st.integers(1, 1_024)


@pytest.mark.parametrize(
    ("remaining", "budget", "chunk_tokens", "expected"),
    [
        ([], 512, 512, []),
        ([2_000], 512, 512, [512]),
        ([2_000], 512, 64, [64]),
        ([7], 512, 512, [7]),
        ([2_000, 30], 512, 512, [482, 30]),  # the short one ends at once, the long one takes what is left
        ([2_000, 500], 512, 512, [128, 384]),  # the oldest is sure of a quarter
        ([30, 2_000], 512, 512, [30, 482]),
        ([2_000, 300, 300], 512, 512, [128, 300, 84]),  # among equals the older one first
        ([2_000, 300, 20], 512, 512, [192, 300, 20]),
        ([5, 5, 5], 1, 512, [1, 0, 0]),  # the smallest budget still advances
    ],
)
def test_share_of_one_step(remaining: list[int], budget: int, chunk_tokens: int, expected: list[int]) -> None:
    assert share_budget(remaining, budget=budget, chunk_tokens=chunk_tokens) == expected


@given(REMAINING, BUDGET, CHUNK)
def test_a_step_stays_in_its_budget_and_wastes_none(remaining: list[int], budget: int, chunk_tokens: int) -> None:
    granted = share_budget(remaining, budget=budget, chunk_tokens=chunk_tokens)
    wanted = [min(tokens, chunk_tokens) for tokens in remaining]
    assert all(0 <= got <= want for got, want in zip(granted, wanted, strict=True))
    assert sum(granted) == min(budget, sum(wanted))


@given(REMAINING.filter(bool), BUDGET, CHUNK)
def test_the_oldest_prompt_advances_by_its_share_in_every_step(
    remaining: list[int], budget: int, chunk_tokens: int
) -> None:
    granted = share_budget(remaining, budget=budget, chunk_tokens=chunk_tokens)
    assert granted[0] >= min(remaining[0], chunk_tokens, max(1, budget // 4))


@given(REMAINING.filter(bool), st.integers(2, 2_048), st.data())
def test_longer_prompts_take_no_more_than_the_oldest_share_from_a_shorter_one(
    remaining: list[int], budget: int, data: st.DataObject
) -> None:
    """As long as a prompt is not done, it and those as short share budget - budget // 4 tokens of each step."""
    index = data.draw(st.integers(0, len(remaining) - 1))
    granted = share_budget(remaining, budget=budget, chunk_tokens=5_000)
    if granted[index] < remaining[index]:
        as_short = sum(got for got, left in zip(granted, remaining, strict=True) if left <= remaining[index])
        assert as_short >= budget - max(1, budget // 4)


def test_a_long_prompt_ends_under_an_endless_stream_of_short_ones() -> None:
    """4,096 tokens at a quarter of 512 a step end after 32 steps, though short prompts fill each step's budget."""
    long_left, num_steps = 4_096, 0
    while long_left:
        granted = share_budget([long_left, *[64] * 8], budget=512, chunk_tokens=512)
        long_left -= granted[0]
        num_steps += 1
    assert num_steps == 32


def make_scheduler(max_prefills: int = 2, max_waiting: int = 3, budget: int = 100) -> PrefillScheduler:
    return PrefillScheduler(
        PrefillLimits(
            max_batched_tokens=budget, chunk_tokens=budget, max_prefills=max_prefills, max_waiting=max_waiting
        )
    )


def jobs(*ids: int) -> list[JobId]:
    return [JobId(i) for i in ids]


LONG = 10_000  # tokens: no short prompt


def admit_all(scheduler: PrefillScheduler, num_uncomputed: int = LONG) -> list[JobId]:
    """What an engine does whose blocks never run out; the jobs it let in."""
    return [job_id for job_id in scheduler.waiting if _admitted(scheduler, job_id, num_uncomputed)]


def _admitted(scheduler: PrefillScheduler, job_id: JobId, num_uncomputed: int) -> bool:
    if may := scheduler.may_admit(num_uncomputed):
        scheduler.admit(job_id)
    return may


def test_jobs_are_admitted_in_order_of_arrival_while_places_last() -> None:
    scheduler = make_scheduler()
    for job_id in jobs(1, 2, 3):
        scheduler.enqueue(job_id)
    assert admit_all(scheduler) == [1, 2]
    assert scheduler.waiting == (3,)
    scheduler.remove(JobId(1))
    assert admit_all(scheduler) == [3]


def test_a_short_prompt_has_a_place_when_long_ones_took_all_theirs() -> None:
    """100 tokens a step, 25 of them the oldest's: what has at most 75 is short. As many short ones as long ones."""
    scheduler = make_scheduler(max_prefills=2, max_waiting=4)
    for job_id in jobs(1, 2, 3, 4, 5, 6):
        scheduler.enqueue(job_id)
    assert admit_all(scheduler) == [1, 2]
    assert not scheduler.may_admit(76)
    assert _admitted(scheduler, JobId(4), 75)
    assert _admitted(scheduler, JobId(5), 75)
    assert not scheduler.may_admit(75)
    assert scheduler.num_slots_free == 2, "the places of short prompts are beside the others"
    scheduler.remove(JobId(1))
    assert _admitted(scheduler, JobId(3), LONG), "a long one's place is free although short ones are at work"
    scheduler.remove(JobId(4))
    assert _admitted(scheduler, JobId(6), 10)


def test_limits_are_replaced_between_steps() -> None:
    scheduler = make_scheduler(max_prefills=1, max_waiting=1)
    scheduler.enqueue(JobId(1))
    admit_all(scheduler)
    scheduler.start(JobId(1), 150)
    assert scheduler.schedule() == [(1, 100)]
    scheduler.limits = PrefillLimits(max_batched_tokens=40, chunk_tokens=30, max_prefills=2, max_waiting=0)
    assert scheduler.schedule() == [(1, 30)]
    assert scheduler.num_slots_free == 1


@pytest.mark.parametrize("field", ["max_batched_tokens", "chunk_tokens", "max_prefills"])
def test_limits_that_would_let_nothing_run_are_refused(field: str) -> None:
    limits = {"max_batched_tokens": 1, "chunk_tokens": 1, "max_prefills": 1, "max_waiting": 0} | {field: 0}
    with pytest.raises(InvalidRequestError, match=f"{field} is 0; allowed is at least 1"):
        PrefillScheduler(PrefillLimits(**limits))


def test_a_tenants_long_prompts_cost_anothers_short_ones_one_step_and_lose_only_what_those_take() -> None:
    """Chunks of 64. One tenant always has 4 prompts of 850 tokens in flight, the other sends 16 tokens every 4 steps:
    each of its prompts is computed in the step after it came, and the first tenant loses those tokens, a sixteenth of
    them all, and no more."""
    scheduler = make_scheduler(max_prefills=2, max_waiting=4, budget=64)
    arrived: dict[JobId, int] = {}
    waits: list[int] = []
    long_ids, num_long_ended, next_id = set(jobs(1, 2, 3, 4)), 0, 5
    lengths = dict.fromkeys(long_ids, 850)
    for job_id in sorted(long_ids):
        scheduler.enqueue(job_id)
    for step in range(1_000):
        if step % 4 == 0:
            arrived[JobId(next_id)], lengths[JobId(next_id)] = step, 16
            scheduler.enqueue(JobId(next_id))
            next_id += 1
        for job_id in scheduler.waiting:
            if _admitted(scheduler, job_id, lengths[job_id]):
                scheduler.start(job_id, lengths[job_id])
        for job_id, count in scheduler.schedule():
            scheduler.advance(job_id, count)
            lengths[job_id] -= count
            if lengths[job_id] == 0 and job_id in long_ids:
                long_ids.remove(job_id)
                num_long_ended += 1
                long_ids.add(JobId(next_id))
                lengths[JobId(next_id)] = 850
                scheduler.enqueue(JobId(next_id))
                next_id += 1
            elif lengths[job_id] == 0:
                waits.append(step - arrived[job_id] + 1)
    assert set(waits) == {1}, "one step each, though two long prompts were at work and two more waited"
    assert num_long_ended == 1_000 * (64 - 16 / 4) // 850 == 70, "of 75 without the other tenant"


def test_a_full_queue_refuses_and_says_so() -> None:
    scheduler = make_scheduler(max_prefills=1, max_waiting=1)
    scheduler.enqueue(JobId(1))
    admit_all(scheduler)
    scheduler.enqueue(JobId(2))
    assert scheduler.num_slots_free == 0
    with pytest.raises(OverloadedError, match="1 prompts in work and 1 waiting"):
        scheduler.enqueue(JobId(3))
    assert (scheduler.num_admitted, scheduler.num_waiting) == (1, 1)


def test_a_computed_prompt_gives_its_slot_back() -> None:
    scheduler = make_scheduler(max_prefills=1)
    scheduler.enqueue(JobId(1))
    scheduler.enqueue(JobId(2))
    assert admit_all(scheduler) == [1]
    assert scheduler.schedule() == []  # its prefix is still loading
    scheduler.start(JobId(1), 150)
    assert scheduler.schedule() == [(1, 100)]
    scheduler.advance(JobId(1), 100)
    assert admit_all(scheduler) == []
    assert scheduler.schedule() == [(1, 50)]
    scheduler.advance(JobId(1), 50)
    assert not scheduler.has_chunks
    assert admit_all(scheduler) == [2]


def test_jobs_age_by_admission_not_by_the_end_of_their_load() -> None:
    scheduler = make_scheduler()
    for job_id in jobs(1, 2):
        scheduler.enqueue(job_id)
    admit_all(scheduler)
    scheduler.start(JobId(2), 1_000)
    scheduler.start(JobId(1), 1_000)
    assert scheduler.schedule() == [(1, 100)]


@pytest.mark.parametrize("stage", ["waiting", "admitted", "computing", "gone"])
def test_a_job_can_be_removed_at_every_stage(stage: str) -> None:
    scheduler = make_scheduler(max_prefills=2, max_waiting=0)
    if stage != "gone":
        scheduler.enqueue(JobId(1))
    if stage in ("admitted", "computing"):
        admit_all(scheduler)
    if stage == "computing":
        scheduler.start(JobId(1), 10)
    scheduler.remove(JobId(1))
    assert scheduler.num_slots_free == 2
    assert not scheduler.has_chunks
    assert scheduler.waiting == ()


@given(st.lists(st.integers(1, 400), min_size=1, max_size=10), st.integers(1, 64), st.integers(1, 64))
def test_every_prompt_is_computed_exactly_once(lengths: list[int], budget: int, chunk_tokens: int) -> None:
    scheduler = PrefillScheduler(PrefillLimits(budget, chunk_tokens, max_prefills=3, max_waiting=len(lengths)))
    computed = dict.fromkeys(jobs(*range(len(lengths))), 0)
    for job_id in computed:
        scheduler.enqueue(job_id)
    for _ in range(sum(lengths)):
        for job_id in scheduler.waiting:
            if _admitted(scheduler, job_id, lengths[job_id]):
                scheduler.start(job_id, lengths[job_id])
        for job_id, count in scheduler.schedule():
            computed[job_id] += count
            scheduler.advance(job_id, count)
    assert list(computed.values()) == lengths
    assert scheduler.num_admitted == scheduler.num_waiting == 0
