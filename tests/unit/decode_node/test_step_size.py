"""A decode step keeps to the inter-token target: prompts' tokens give way first, then newcomers to the batch."""

from __future__ import annotations

from decode_node.scheduler import Scheduler
from decode_node.step_size import DecodeStepSize
from kvrelay.limits import DecodeLimits, QueueMarks
from tests.unit.decode_node.test_decode_scheduler import EndlessMemory, make_sequence, step

LIMITS = DecodeLimits(max_batch=64, max_batched_tokens=512)
MARKS = QueueMarks()


def run(size: DecodeStepSize, num_rows: int, step_s: float, *, num_tail_tokens: int = 0, num_waiting: int = 0) -> None:
    size.stepped(LIMITS, num_rows, num_rows + num_tail_tokens, step_s, num_waiting=num_waiting)


def test_without_marks_and_target_a_step_has_what_the_limits_say_however_long_it_takes() -> None:
    size = DecodeStepSize()
    for _ in range(10):
        size.waited(9.0)
        run(size, 64, 9.0, num_tail_tokens=400)
        run(size, 64, 9.0)
    assert (size.max_rows(LIMITS), size.max_tail_tokens(LIMITS, 64)) == (64, 448)


def test_without_marks_the_target_still_holds_and_waits_change_nothing() -> None:
    size = DecodeStepSize(itl_target_s=0.05)
    size.waited(9.0)
    assert size.max_tail_tokens(LIMITS, 8) == 504
    run(size, 8, 0.2, num_tail_tokens=400)
    run(size, 40, 0.08)
    assert (size.max_rows(LIMITS), size.max_tail_tokens(LIMITS, 8)) == (30, 75)


def test_without_a_target_any_number_of_rows_may_join() -> None:
    size = DecodeStepSize(MARKS)
    run(size, 64, 9.0)
    assert size.max_rows(LIMITS) == 64


def test_slow_steps_let_no_more_join_than_three_quarters_of_what_they_had() -> None:
    size = DecodeStepSize(MARKS, itl_target_s=0.05)
    for _ in range(10):  # those that run stay: the same batch says the same
        run(size, 40, 0.08)
    assert size.max_rows(LIMITS) == 30


def test_rows_come_back_one_step_after_the_other_while_there_is_headroom_and_someone_waits() -> None:
    size = DecodeStepSize(MARKS, itl_target_s=0.05)
    run(size, 16, 0.08)
    assert size.max_rows(LIMITS) == 12
    run(size, 12, 0.03)
    assert size.max_rows(LIMITS) == 12, "nobody waits"
    run(size, 11, 0.03, num_waiting=1)
    assert size.max_rows(LIMITS) == 12, "it is not the bound that keeps it out"
    run(size, 12, 0.045, num_waiting=1)
    assert size.max_rows(LIMITS) == 12, "the target is near"
    run(size, 12, 0.03, num_waiting=1)
    assert size.max_rows(LIMITS) == 16


def test_tokens_of_prompts_give_way_before_rows_do() -> None:
    size = DecodeStepSize(MARKS, itl_target_s=0.05)
    run(size, 8, 0.2, num_tail_tokens=400)
    assert (size.max_rows(LIMITS), size.max_tail_tokens(LIMITS, 8)) == (64, 75)


def test_without_a_target_prompts_leave_who_runs_beside_them_no_longer_a_wait_than_the_high_mark() -> None:
    size = DecodeStepSize(MARKS)
    run(size, 2, 0.5, num_tail_tokens=400)
    assert size.max_tail_tokens(LIMITS, 2) == 75, "a quarter of what it had, at least, and a quarter less"
    run(size, 2, 0.2, num_tail_tokens=75)
    assert size.max_tail_tokens(LIMITS, 2) == 27
    run(size, 2, 0.1, num_tail_tokens=27)
    assert size.max_tail_tokens(LIMITS, 2) == 27
    assert size.max_rows(LIMITS) == 64


def test_once_it_is_known_what_a_prompts_token_takes_no_step_beside_others_has_more_than_the_mark_leaves() -> None:
    with_marks, with_target, fixed = DecodeStepSize(MARKS), DecodeStepSize(MARKS, itl_target_s=0.05), DecodeStepSize()
    for size in (with_marks, with_target, fixed):
        size.measured(prompt_token_s=0.002, rows_s=0.01)
    assert [size.max_tail_tokens(LIMITS, 2) for size in (with_marks, with_target, fixed)] == [50, 25, 510]
    assert with_marks.max_tail_tokens(LIMITS, 1) == 511, "nothing runs beside it"
    with_marks.measured(prompt_token_s=1.0, rows_s=0.01)
    assert with_marks.max_tail_tokens(LIMITS, 2) == 16


def test_an_answers_own_target_leaves_prompts_what_its_step_does_not_take_and_never_nothing() -> None:
    """2 ms a token of a prompt; without any a step takes 10 ms."""
    for size in (DecodeStepSize(), DecodeStepSize(MARKS), DecodeStepSize(itl_target_s=9.0)):
        assert size.max_tail_tokens(LIMITS, 2, 0.061) == 510, "what a token takes is not known"
        size.measured(prompt_token_s=0.002, rows_s=0.01)
        assert [size.max_tail_tokens(LIMITS, 2, target_s) for target_s in (0.061, 0.043, 0.015)] == [25, 16, 16]
        assert size.max_tail_tokens(LIMITS, 2, 0.001) == 16, "steps without prompts are too long already"
        assert size.max_tail_tokens(DecodeLimits(max_batch=4, max_batched_tokens=8), 4, 0.061) == 4


def test_of_the_nodes_bound_and_the_answers_the_lesser_holds() -> None:
    size = DecodeStepSize(MARKS, itl_target_s=0.05)
    size.measured(prompt_token_s=0.001, rows_s=0.01)
    assert [size.max_tail_tokens(LIMITS, 2, target_s) for target_s in (0.0, 0.0405, 9.0)] == [50, 30, 50]


def test_the_least_target_counts_of_those_that_run_and_not_of_a_prompt_that_is_still_computed() -> None:
    scheduler = Scheduler(DecodeLimits(max_batch=8, max_batched_tokens=512))
    scheduler.size.measured(prompt_token_s=0.001, rows_s=0.01)
    prompt, others = make_sequence(400), [make_sequence(1) for _ in range(3)]
    prompt.itl_target_s = 0.02
    scheduler.add(prompt)
    assert step(scheduler) == [(prompt, 400)], "nobody waits for its step"
    late = make_sequence(400)
    for sequence, target_s in zip(others, (0.0, 0.0605, 0.1005), strict=True):
        sequence.itl_target_s = target_s
        scheduler.add(sequence)
    scheduler.add(late)
    scheduler.remove(prompt)
    assert dict(step(scheduler))[late] == 1 + 50
    scheduler.remove(others[1])
    assert dict(step(scheduler))[late] == 1 + 90
    scheduler.remove(others[2])
    assert dict(step(scheduler))[late] == 400 - 51 - 91, "whoever is left has no target"


def test_a_prompt_that_is_computed_while_nothing_runs_is_in_nobodys_way() -> None:
    size = DecodeStepSize(MARKS)
    run(size, 1, 0.5, num_tail_tokens=400)
    assert size.max_tail_tokens(LIMITS, 1) == 511


def test_one_sequence_alone_is_never_too_many() -> None:
    size = DecodeStepSize(MARKS, itl_target_s=0.001)
    for _ in range(20):
        run(size, 1, 1.0)
    assert size.max_rows(LIMITS) == 64
    for _ in range(20):
        run(size, 2, 1.0)
    assert size.max_rows(LIMITS) == 1


def test_newcomers_that_wait_long_leave_less_to_prompts_but_never_nothing() -> None:
    size = DecodeStepSize(MARKS)
    for _ in range(100):
        size.waited(1.0)
    assert size.max_tail_tokens(LIMITS, 64) == 16


def test_a_sequence_that_runs_stays_when_fewer_may_join() -> None:
    size = DecodeStepSize(MARKS, itl_target_s=0.05)
    scheduler = Scheduler(DecodeLimits(max_batch=4, max_batched_tokens=8), size)
    running, late = [make_sequence(1) for _ in range(4)], make_sequence(1)
    for sequence in (*running, late):
        scheduler.add(sequence)
    assert [row for row, _ in step(scheduler)] == running
    scheduler.stepped(4, 4, step_s=0.2)
    assert scheduler.bounds[0] == 3
    assert [row for row, _ in step(scheduler)] == running
    scheduler.remove(running[0])
    assert [row for row, _ in step(scheduler)] == running[1:], "three may, and run"


def test_the_first_request_of_an_idle_node_is_in_the_next_step() -> None:
    size = DecodeStepSize(MARKS, itl_target_s=0.05)
    for _ in range(20):
        run(size, 2, 9.0)
        size.waited(9.0)
    scheduler = Scheduler(LIMITS, size)
    first = make_sequence(9)
    scheduler.add(first)
    assert [row.sequence for row in scheduler.schedule(EndlessMemory()).batch.rows] == [first]
