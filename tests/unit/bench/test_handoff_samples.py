"""Medians over the rounds, bars, and how they are printed."""

from __future__ import annotations

import pytest

from bench.handoff.samples import Bar, Samples, bars_as_markdown


@pytest.fixture
def samples() -> Samples:
    found = Samples()
    for value in (2.0, 1.0, 4.0):
        found.add("speed", "ours", "GB/s", value)
    found.add("speed", "theirs", "GB/s", 2.5)
    found.add("speed", "theirs", "CPU s", 0.5)
    found.add("time", "ping", "ms", 7.0)
    return found


OURS, THEIRS, PING = ("speed", "ours", "GB/s"), ("speed", "theirs", "GB/s"), ("time", "ping", "ms")


def test_a_table_has_medians_with_least_and_greatest_and_dashes_for_what_was_not_measured(samples: Samples) -> None:
    assert samples.as_markdown("speed").splitlines() == [
        "|  | GB/s | CPU s |",
        "| --- | ---: | ---: |",
        "| ours | 2.00 (1.00-4.00) | - |",
        "| theirs | 2.50 | 0.50 |",
    ]
    assert samples.as_markdown("unknown") == ""


def test_json_has_every_sample(samples: Samples) -> None:
    assert samples.as_json()[0] == {"table": "speed", "line": "ours", "column": "GB/s", "values": [2.0, 1.0, 4.0]}
    assert len(samples.as_json()) == 4


def test_a_ratio_is_of_medians(samples: Samples) -> None:
    assert Bar("", OURS, THEIRS, least=0.5).measured(samples) == 0.8
    assert Bar("", OURS, most=1.0).measured(samples) == 2.0
    assert Bar("", OURS, ("speed", "nobody", "GB/s"), least=1.0).measured(samples) is None


@pytest.mark.parametrize(
    ("bar", "value", "verdict"),
    [
        (Bar("", OURS, least=0.55, aim=0.7), 0.54, "missed"),
        (Bar("", OURS, least=0.55, aim=0.7), 0.55, "met, not the aim"),
        (Bar("", OURS, least=0.55, aim=0.7), 0.7, "met, and the aim"),
        (Bar("", OURS, most=5.0), 5.0, "met"),
        (Bar("", OURS, most=5.0), 5.1, "missed"),
        (Bar("", OURS, most=5.0, aim=2.0), 1.0, "met, and the aim"),
    ],
)
def test_a_bar_is_met_or_missed(bar: Bar, value: float, verdict: str) -> None:
    assert bar.verdict(value) == verdict


def test_bars_are_listed_with_their_goals_and_those_not_measured_are_left_out(samples: Samples) -> None:
    bars = [
        Bar("rate over theirs", OURS, THEIRS, least=0.55, aim=0.7),
        Bar("ping", PING, most=5.0),
        Bar("never measured", ("time", "pong", "ms"), most=5.0),
    ]
    assert bars_as_markdown(bars, samples).splitlines() == [
        "|  | measured | bar |  |",
        "| --- | ---: | ---: | ---: |",
        "| rate over theirs | 0.80 | at least 0.55 (aim 0.7) | met, and the aim |",
        "| ping | 7.00 | at most 5 | missed |",
    ]
