"""What is set aside for an answer, by how long those before it were."""

from __future__ import annotations

import pytest

from coordinator.output_lengths import MAX_TENANTS, MIN_ANSWERS, NUM_KEPT, OutputLengths


@pytest.mark.parametrize(("quantile", "expected"), [(0.9, 90), (0.5, 50), (1.0, 100), (0.001, 1), (0.901, 91)])
def test_as_many_tokens_as_so_large_a_part_of_the_last_answers_took(quantile: float, expected: int) -> None:
    lengths = OutputLengths(quantile)
    for number in range(100, 0, -1):
        lengths.note("a", number)
    assert lengths.expected("a", most=1_000) == expected
    assert lengths.expected("a", most=40) == min(expected, 40)


def test_all_of_max_tokens_until_enough_answers_are_known() -> None:
    lengths = OutputLengths(0.9)
    assert lengths.expected("a", 256) == 256
    for _ in range(MIN_ANSWERS - 1):
        lengths.note("a", 10)
    assert lengths.expected("a", 256) == 256
    lengths.note("a", 10)
    assert lengths.expected("a", 256) == 10


def test_a_tenant_with_few_answers_is_taken_for_one_like_all() -> None:
    lengths = OutputLengths(0.9)
    for _ in range(MIN_ANSWERS):
        lengths.note("a", 10)
    for _ in range(MIN_ANSWERS - 1):
        lengths.note("b", 200)
    assert (lengths.expected("a", 256), lengths.expected("b", 256), lengths.expected("c", 256)) == (10, 200, 200)
    lengths.note("b", 50)
    assert lengths.expected("b", 256) == 200, "by its own"


def test_what_was_long_ago_is_forgotten() -> None:
    lengths = OutputLengths(0.9)
    for _ in range(NUM_KEPT):
        lengths.note("a", 200)
    for _ in range(NUM_KEPT):
        lengths.note("a", 10)
    assert lengths.expected("a", 256) == 10


def test_of_many_tenants_the_last_ones_are_known() -> None:
    lengths = OutputLengths(0.5)
    for _ in range(MIN_ANSWERS):
        lengths.note("early", 1)
    for number in range(MAX_TENANTS):
        lengths.note(f"t{number}", 7)
    assert lengths.num_tenants == MAX_TENANTS
    assert lengths.expected("early", 256) == 7, "by all"
