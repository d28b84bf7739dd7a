"""Lengths of time as people write them on a command line: 90, 90s, 5m, 1h, 2d."""

from __future__ import annotations

import argparse
import re

MAX_TTL_S = 3_650 * 86_400.0  # ten years: a longer one is a slip

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")


def parse_duration(text: str) -> float:
    """Seconds of "90", "1.5h" or "5m". Raises ValueError."""
    match = _DURATION.fullmatch(text.strip().lower()) if text.isascii() else None
    if match is None:
        raise ValueError(text)
    return float(match[1]) * _UNITS_S[match[2]]


def duration_argument(text: str) -> float:
    """As parse_duration, for argparse."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no length of time; write one such as 90s, 5m, 1h or 2d"
        ) from error


def ttl_argument(text: str) -> float:
    """As duration_argument, over 0; "none" is a time that never ends, 0 on the wire."""
    if text.strip().lower() == "none":
        return 0.0
    seconds = duration_argument(text)
    if not 0 < seconds <= MAX_TTL_S:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range; over 0 and at most 3650d are allowed, and none")
    return seconds


def show_duration(seconds: float) -> str:
    """Rounded for people, in its largest unit: "90 s" is "1.5m"."""
    for unit in ("d", "h", "m"):
        if seconds >= _UNITS_S[unit]:
            return f"{round(seconds / _UNITS_S[unit], 1):g}{unit}"
    return f"{seconds:.0f}s"
