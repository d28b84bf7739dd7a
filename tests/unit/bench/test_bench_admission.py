"""The simulation of overload runs, and shows what it is there to show."""

from __future__ import annotations

from typing import Any

import pytest

from bench.admission import LOADS, Simulation, main, offered


def test_tokens_go_by_weight_at_twice_the_capacity() -> None:
    simulation = Simulation(LOADS, offered(LOADS, 2.0), seconds=120.0, max_queue=256)
    simulation.run()
    served = {name: results.tokens_served for name, results in simulation.results.items()}
    shares = {name: tokens / sum(served.values()) for name, tokens in served.items()}
    assert shares == {
        "search": pytest.approx(1 / 2, rel=0.1),
        "chat": pytest.approx(1 / 3, rel=0.1),
        "batch": pytest.approx(1 / 6, rel=0.2),  # a few dozen large requests
    }
    assert all(max(results.queue) <= 256 for results in simulation.results.values())
    search = simulation.results["search"]
    assert search.num_returned_accepted > 0.9 * search.num_returned > 100


def test_it_prints_a_table_for_each_load(capsys: pytest.CaptureFixture[Any]) -> None:
    assert main(["--minutes", "0.2", "--overload", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("| search | 50.0% |") == 2
    assert "everyone at 0.5x of its share" in printed
    assert "batch floods" in printed
