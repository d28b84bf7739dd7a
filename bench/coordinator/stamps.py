"""Token ids that say when they were sent: what one process writes, another one of the same machine reads."""

from __future__ import annotations

import time

UNIT_NS = 10_000
FIRST_ID = 1_000  # beyond the ids that a tokenizer keeps for itself
NUM_IDS = 48_000  # so that a token may be under way for 0.48 s
VOCAB_SIZE = 49_152  # of the demo model, whose tokenizer reads them


def stamp(now_ns: int | None = None) -> int:
    """The id of this moment, of CLOCK_MONOTONIC, which all processes share."""
    return FIRST_ID + (time.monotonic_ns() if now_ns is None else now_ns) // UNIT_NS % NUM_IDS


def age_s(token_id: int, now_ns: int) -> float:
    """Since the id was made, which was less than 0.48 s ago."""
    return (now_ns // UNIT_NS - (token_id - FIRST_ID)) % NUM_IDS * UNIT_NS / 1e9
