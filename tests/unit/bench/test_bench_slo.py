"""The model of a cluster that requests with targets are tried on."""

from __future__ import annotations

import pytest

from bench.slo import Simulation, capacity_per_s, main
from coordinator.slo import NO_TARGETS, Targets


def test_at_twice_the_capacity_who_is_let_in_is_in_time_and_so_is_who_comes_back() -> None:
    load, targets = 2 * capacity_per_s(), Targets(ttft_s=5.0)
    results = Simulation(load, 60.0, targets, 5.0, part_back=0.5).run()
    assert results.num_in_time >= 0.95 * len(results.errors_s)
    assert results.num_returned_let_in >= 0.9 * results.num_returned > 0
    assert sorted(results.errors_s)[int(0.95 * len(results.errors_s))] < 1.0
    without = Simulation(load, 60.0, NO_TARGETS, 5.0, part_back=0.0).run()
    assert results.num_in_time > 4 * without.num_in_time


def test_each_row_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--minutes", "0.1", "--load", "0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[1] for line in lines[2:6]] == [
        "none",
        "nobody comes back",
        "half come back",
        "all come back",
    ]
