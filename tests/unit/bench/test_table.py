"""Medians, ratios and how they are printed."""

from __future__ import annotations

import pytest

from bench.engine.table import Row, number, percentile, ratios, speeds, spread

OURS = Row("kvrelay", {"prefill": [300.0, 100.0, 260.0], "decode": [50.0]})
SLOW = Row("slow", {"prefill": [100.0], "decode": [10.0, 60.0, 20.0]})
FAST = Row("fast", {"prefill": [400.0, 500.0]})


def test_speeds_are_medians_with_their_least_and_greatest() -> None:
    assert speeds([OURS, FAST], ["prefill", "decode"]).splitlines() == [
        "| tokens/s | prefill | decode |",
        "| --- | ---: | ---: |",
        "| kvrelay | 260 (100-300) | 50.0 |",
        "| fast | 450 (400-500) | - |",
    ]


def test_ratios_are_of_medians_and_the_best_peer_is_another_in_each_column() -> None:
    assert ratios(OURS, [SLOW, FAST], ["prefill", "decode"]).splitlines() == [
        "| kvrelay ... | prefill | decode |",
        "| --- | ---: | ---: |",
        "| over slow | 2.60 | 2.50 |",
        "| over fast | 0.58 | - |",
        "| over the best peer | 0.58 | 2.50 |",
    ]


def test_a_single_peer_is_not_repeated_as_the_best() -> None:
    assert "best" not in ratios(OURS, [SLOW], ["prefill"])


def test_what_we_have_not_measured_has_no_ratio() -> None:
    assert ratios(Row("kvrelay", {}), [SLOW], ["prefill"]).splitlines()[-1] == "| over slow | - |"


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12,346"), (100.04, "100"), (99.44, "99.4"), (9.876, "9.88"), (0.5, "0.50")]
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_spread_of_nothing_is_a_dash() -> None:
    assert spread([]) == "-"


@pytest.mark.parametrize(("percent", "expected"), [(50, 50.0), (99, 99.0), (100, 100.0), (1, 1.0), (0, 1.0)])
def test_percentiles_are_of_the_nearest_rank(percent: int, expected: float) -> None:
    assert percentile([float(value) for value in range(100, 0, -1)], percent) == expected


def test_the_99th_of_few_values_is_the_greatest() -> None:
    assert percentile([1.0, 5.0, 2.0], 99) == 5.0


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
