"""A machine that stands still is told apart from a cluster that fails."""

from __future__ import annotations

import pytest

from tests.chaos.stalls import AFTER_S, STALL_S, TICK_S, StallWatch


def test_a_late_tick_is_a_stall_and_touches_what_ran_then_or_soon_after() -> None:
    watch = StallWatch()
    watch.tick(10.0, 10.0 + TICK_S + STALL_S + 0.5)
    assert len(watch.stalls) == 1
    end = watch.stalls[0].end
    assert watch.touches(5.0, 10.5)
    assert watch.touches(end + AFTER_S - 0.1, end + 60.0)
    assert not watch.touches(1.0, 9.9)
    assert not watch.touches(end + AFTER_S + 0.1, end + 60.0)
    assert watch.worst_s == pytest.approx(TICK_S + STALL_S + 0.5)


def test_a_tick_in_time_is_none() -> None:
    watch = StallWatch()
    watch.tick(10.0, 10.0 + TICK_S + STALL_S / 2)
    assert watch.stalls == []
    assert not watch.touches(0.0, 100.0)
    assert watch.worst_s == 0.0
