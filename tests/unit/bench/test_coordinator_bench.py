"""What the coordinator's benchmark is made of: stamps that are read in another process, and nodes that keep a pace."""

from __future__ import annotations

import pytest

from bench.coordinator.fake_nodes import FakeDecodeNode
from bench.coordinator.stamps import FIRST_ID, NUM_IDS, UNIT_NS, VOCAB_SIZE, age_s, stamp


def test_a_stamp_tells_how_long_ago_it_was_made() -> None:
    now_ns = 123_456_789_000_000
    assert age_s(stamp(now_ns), now_ns + 2_500_000) == pytest.approx(0.0025)


def test_a_stamp_is_read_across_the_moment_when_ids_begin_again() -> None:
    last_ns = (NUM_IDS - 1) * UNIT_NS
    assert stamp(last_ns) == FIRST_ID + NUM_IDS - 1
    assert stamp(last_ns + UNIT_NS) == FIRST_ID
    assert age_s(stamp(last_ns), last_ns + 3 * UNIT_NS) == pytest.approx(30e-6)


def test_stamps_are_ids_of_the_vocabulary() -> None:
    assert max(stamp(number * UNIT_NS) for number in range(NUM_IDS)) < VOCAB_SIZE


@pytest.mark.parametrize(
    ("after", "expected"),
    [(10.0, 10.025), (10.024, 10.025), (10.026, 10.075), (0.0, 0.025)],
)
async def test_a_node_steps_at_its_own_phase(after: float, expected: float) -> None:
    node = FakeDecodeNode(1, 64, phase=0.5, pace=lambda: 20.0)
    assert node._next_step(after, 20.0) == pytest.approx(expected)


async def test_answers_of_one_node_step_together() -> None:
    node = FakeDecodeNode(1, 64, phase=0.25, pace=lambda: 20.0)
    assert node._next_step(10.013, 20.0) == node._next_step(10.06, 20.0)
