"""Lengths of time on command lines."""

from __future__ import annotations

import argparse

import pytest

from kvrelay.duration import duration_argument, parse_duration, show_duration, ttl_argument


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90.0), ("90s", 90.0), ("5m", 300.0), ("1.5H", 5_400.0), (" 2d ", 172_800.0), ("0", 0.0)],
)
def test_seconds(text: str, expected: float) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "5x", "-1", "1e3", "m", "5 m", "inf", "none", "٣"])
def test_what_is_no_length_of_time(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no length of time; write one such as 90s"):
        duration_argument(text)


def test_a_time_to_live_may_have_no_end() -> None:
    assert (ttl_argument("none"), ttl_argument("5m")) == (0.0, 300.0)


@pytest.mark.parametrize("text", ["0", "0s", "3651d", "99999999999999d"])
def test_a_time_to_live_is_over_0_and_no_slip(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="over 0 and at most 3650d are allowed, and none"):
        ttl_argument(text)


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0s"), (59.4, "59s"), (90, "1.5m"), (3_600, "1h"), (1e6, "11.6d")])
def test_shown_in_the_largest_unit(seconds: float, shown: str) -> None:
    assert show_duration(seconds) == shown
