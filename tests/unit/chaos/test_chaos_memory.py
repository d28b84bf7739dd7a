"""When memory has grown: against the level of the same process once warm."""

from __future__ import annotations

import os

from kvrelay.types import Role
from tests.chaos.memory import ALLOWED_BYTES, WARM_AFTER_S, WARM_FOR_S, Growth, Sample, rss_bytes, warm_level
from tests.chaos.plan import Victim

VICTIM = Victim(Role.KVSTORE, 0)
WARM_S = WARM_AFTER_S + WARM_FOR_S


def test_the_level_is_the_most_of_the_first_warm_seconds() -> None:
    samples = [Sample(0.0, 900), Sample(WARM_AFTER_S, 100), Sample(WARM_S, 120), Sample(WARM_S + 1, 500)]
    assert warm_level(samples) == 120


def test_a_process_that_was_not_watched_that_long_has_no_level() -> None:
    assert warm_level([]) is None
    assert warm_level([Sample(0.0, 100), Sample(WARM_AFTER_S + 1, 100)]) is None


def test_growth_over_the_level_is_bounded() -> None:
    level = 10 * ALLOWED_BYTES
    assert Growth(VICTIM, level, level + ALLOWED_BYTES).is_bounded
    assert not Growth(VICTIM, level, level + 3 * ALLOWED_BYTES).is_bounded
    assert Growth(VICTIM, None, level).is_bounded


def test_the_memory_of_a_process_is_what_the_system_says() -> None:
    mine = rss_bytes(os.getpid())
    assert mine is not None
    assert 2**20 < mine < 2**40
    assert rss_bytes(2**22 + 1) is None
