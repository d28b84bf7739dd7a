"""Plans of faults and of load: the same for the same seed, and of everything some."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from kvrelay.types import Role
from tests.chaos.asks import DEMO, SEVERAL, TINY, Sizes, asks, plan_shapes
from tests.chaos.plan import CALM_S, PAUSE_S, WARM_UP_S, Fault, Kind, Victim, plan_faults, victims

ALL = victims(dict.fromkeys(Role, 2))
VOCAB_SIZE = 50_000


def faults(seed: int, seconds: float = 300.0) -> tuple[Fault, ...]:
    return plan_faults(seed, seconds, tuple(Kind), ALL)


def test_a_plan_is_a_function_of_its_seed() -> None:
    assert faults(7) == faults(7)
    assert faults(7) != faults(8)


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    short = faults(7, 100.0)
    assert faults(7, 300.0)[: len(short)] == short


def test_faults_come_one_after_another_between_warm_up_and_calm() -> None:
    planned = faults(1)
    assert planned[0].at_s == WARM_UP_S
    assert planned[-1].at_s < 300.0 - CALM_S
    for before, after in itertools.pairwise(planned):
        assert PAUSE_S[0] - 0.02 <= after.at_s - before.at_s <= PAUSE_S[1] + 0.02
    assert [fault.number for fault in planned] == list(range(len(planned)))


def test_every_kind_strikes_every_role_before_any_does_twice() -> None:
    num_pairs = len(Kind) * len(Role)
    counts = Counter((fault.kind, fault.victim.role) for fault in faults(1)[:num_pairs])
    assert set(counts.values()) == {1}
    assert len(counts) == num_pairs


def test_only_kinds_and_victims_that_were_named_are_planned() -> None:
    among = (Victim(Role.DECODE_NODE, 1),)
    planned = plan_faults(3, 60.0, (Kind.STOP,), among)
    assert planned
    assert {(fault.kind, fault.victim) for fault in planned} == {(Kind.STOP, among[0])}


def test_no_fault_fits_into_a_run_that_is_too_short() -> None:
    assert faults(1, WARM_UP_S + CALM_S) == ()


@pytest.mark.parametrize("sizes", [TINY, DEMO])
def test_shapes_are_a_function_of_the_seed_and_fit_the_model(sizes: Sizes) -> None:
    shapes = plan_shapes(5, 48, sizes)
    assert shapes == plan_shapes(5, 48, sizes)
    assert shapes != plan_shapes(6, 48, sizes)
    for shape in shapes:
        assert shape.sampling.max_tokens is not None
        assert shape.sampling.seed is not None
        assert len(shape.prompt_ids) + shape.sampling.max_tokens <= sizes.num_blocks * 16
        shape.sampling.validate(VOCAB_SIZE)


def test_shapes_are_of_every_sort() -> None:
    shapes = plan_shapes(5, 48, TINY)
    beginnings = Counter(shape.prompt_ids[: TINY.shared[0]] for shape in shapes)
    assert beginnings.most_common(1)[0][1] >= 3, "prompts begin alike"
    assert any(len(shape.prompt_ids) <= TINY.short[1] for shape in shapes)
    assert any(len(shape.prompt_ids) >= TINY.long[0] + 60 for shape in shapes)
    assert {shape.n for shape in shapes} >= {1, *SEVERAL}
    assert any(shape.wants_stop for shape in shapes)
    assert any(shape.sampling.logprobs for shape in shapes)
    assert any(shape.sampling.frequency_penalty for shape in shapes)
    assert {shape.sampling.greedy for shape in shapes} == {True, False}


def test_what_a_worker_asks_is_a_function_of_seed_and_worker() -> None:
    def first(seed: int, worker: int) -> list[object]:
        return list(itertools.islice(asks(seed, worker, 48, 2), 200))

    assert first(5, 0) == first(5, 0)
    assert first(5, 0) != first(5, 1)
    assert first(5, 0) != first(6, 0)


def test_asks_are_of_every_sort() -> None:
    some = list(itertools.islice(asks(5, 0, 48, 2), 1000))
    assert {ask.coordinator for ask in some} == {0, 1}
    assert len({ask.shape for ask in some}) == 48
    assert {None} < {ask.leave for ask in some}
    assert all(ask.leave_after_s > 0 for ask in some if ask.leave)
    assert len({ask.name for ask in some}) == 1000
