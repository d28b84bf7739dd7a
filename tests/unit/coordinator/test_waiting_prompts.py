"""What a new prompt waits for on a prefill node, against sums made by hand and against the node's own scheduler."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from coordinator.waiting_prompts import WaitingPrompts
from kvrelay.limits import PrefillLimits
from prefill_node.scheduler import JobId, PrefillScheduler

STEP, PLACES = 512, 4


@pytest.mark.parametrize(
    ("waiting", "num_tokens", "before"),
    [
        ([], 100, 0),
        ([500], 1_000, 250),  # all of them are in the step that runs, which is half done
        ([3_000, 3_000], 4_000, 6_000 - 256),
        ([3_000, 3_000], 100, 256 + 412),  # and a whole step, which others fill up
        ([3_000, 3_000], 384, 256 + 128),  # the oldest gets a quarter
        ([3_000, 3_000], 385, 256 + 1_024 - 385),
        ([200, 3_000], 500, 256 + 512 - 500),  # the shorter one is in the step that runs
        ([200, 900, 3_000], 500, 256 + 512 - 500),
        ([3_000, 200, 900], 500, 256 + 1_024 - 500),
    ],
)
def test_shorter_ones_go_first_the_oldest_has_its_quarter_and_steps_are_full(
    waiting: list[float], num_tokens: int, before: float
) -> None:
    assert WaitingPrompts(waiting).before(num_tokens, STEP, PLACES) == pytest.approx(before)


@pytest.mark.parametrize(
    ("num_tokens", "num_prompts", "before"),
    [
        (600, 3, 256 + 1_024 - 600),
        (600, 4, 256 + 7 * 512 - 600),  # one of the four ends first
        (384, 7, 256 + 512 - 384),
        (384, 8, 256 + 6 * 512 - 384),
    ],
)
def test_a_prompt_for_which_there_is_no_place_waits_until_one_ends(
    num_tokens: int, num_prompts: int, before: float
) -> None:
    """There are four places, and four more for those that three quarters of a step of 512 tokens compute."""
    assert WaitingPrompts([2_250.0] * num_prompts).before(num_tokens, STEP, PLACES) == pytest.approx(before)


def test_of_any_two_the_longer_waits_for_the_shorter() -> None:
    prompts = WaitingPrompts([3_000, 200, 900])
    assert [prompts.each(num_tokens) for num_tokens in (100, 500, 900, 5_000)] == [300, 1_200, 2_000, 4_100]


def test_it_is_about_what_the_nodes_scheduler_does() -> None:
    """Within a hundred tokens on average and two steps at most, where nothing comes later."""
    draw, errors = random.Random(0), []
    for _ in range(300):
        waiting = [draw.randint(16, 2_000) for _ in range(draw.randint(0, PLACES - 1))]
        num_tokens = draw.randint(16, 2_000)
        told = WaitingPrompts(waiting).before(num_tokens, STEP, PLACES) + num_tokens
        errors.append(abs(told - _computed(waiting, num_tokens)))
    assert mean(errors) < 100
    assert max(errors) <= 2 * STEP


def _computed(waiting: list[int], num_tokens: int) -> float:
    """Tokens until the new prompt's first, of which half a step is done when it comes."""
    scheduler = PrefillScheduler(PrefillLimits(STEP, STEP, PLACES, 4))
    for number, count in enumerate(waiting):
        _add(scheduler, JobId(number), count)
    total = _step(scheduler) / 2 if waiting else 0.0
    new = JobId(len(waiting))
    _add(scheduler, new, num_tokens)
    left = num_tokens
    while left:
        chunks = scheduler.schedule()
        left -= dict(chunks).get(new, 0)
        total += _step(scheduler)
    return total


def _add(scheduler: PrefillScheduler, job_id: JobId, num_tokens: int) -> None:
    scheduler.enqueue(job_id)
    scheduler.admit(job_id)
    scheduler.start(job_id, num_tokens)


def _step(scheduler: PrefillScheduler) -> int:
    chunks = scheduler.schedule()
    for job_id, count in chunks:
        scheduler.advance(job_id, count)
    return sum(count for _, count in chunks)
