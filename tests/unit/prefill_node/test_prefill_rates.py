"""What a prefill node measures of its steps and its links."""

from __future__ import annotations

import pytest

from kvrelay.cluster import NodeRates
from prefill_node.pace import Pace
from prefill_node.rates import PrefillRates


def test_each_kind_of_work_has_its_rate() -> None:
    rates = PrefillRates()
    assert rates.rates() == NodeRates()
    rates.computed(512, 0.25)
    rates.carried(1_000_000, 0.01)
    rates.loaded(500_000, 0.25)
    assert rates.rates() == NodeRates(2_048, 100_000_000, 2_000_000)


def test_a_link_tells_what_it_carried_and_not_how_long_it_idled() -> None:
    """Messages of 100,000 bytes, answered after 10 ms each, and an hour between them."""
    rates = PrefillRates()
    pace = Pace(1_000, 1_000_000, rates.carried)
    for start in (0.0, 3_600.0, 7_200.0):
        pace.answered(pace.sent(100_000, start), start + 0.01)
    assert rates.rates().handoff_bytes_per_s == pytest.approx(10_000_000)
