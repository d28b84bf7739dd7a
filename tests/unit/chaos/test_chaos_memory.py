"""When memory has grown: against the level of the same process once warm."""

from __future__ import annotations

import os

import pytest

from kvrelay.types import Role
from tests.chaos.memory import LEAST_LIFE_S, WARM_AFTER_S, Growth, Sample, rss_bytes, warm_level
from tests.chaos.plan import Victim

MIB = 2**20


def test_the_level_is_the_most_of_the_warm_half_of_a_life() -> None:
    samples = [Sample(0.0, 900), Sample(WARM_AFTER_S, 100), Sample(20.0, 120), Sample(21.0, 500), Sample(40.0, 600)]
    assert warm_level(samples) == 120


def test_a_process_that_was_not_watched_that_long_has_no_level() -> None:
    assert warm_level([]) is None
    assert warm_level([Sample(0.0, 100), Sample(WARM_AFTER_S, 100), Sample(LEAST_LIFE_S - 1, 100)]) is None


@pytest.mark.parametrize(("role", "allowed_mib"), [(Role.KVSTORE, 16), (Role.COORDINATOR, 16), (Role.DECODE_NODE, 64)])
def test_growth_over_the_level_is_bounded(role: Role, allowed_mib: int) -> None:
    victim = Victim(role, 0)
    assert Growth(victim, 100 * MIB, (110 + allowed_mib) * MIB).is_bounded
    assert not Growth(victim, 100 * MIB, (111 + allowed_mib) * MIB).is_bounded
    assert Growth(victim, None, 1000 * MIB).is_bounded


def test_the_memory_of_a_process_is_what_the_system_says() -> None:
    mine = rss_bytes(os.getpid())
    assert mine is not None
    assert 2**20 < mine < 2**40
    assert rss_bytes(2**22 + 1) is None
