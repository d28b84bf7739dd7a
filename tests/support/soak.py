"""How long repetitive tests are: KVRELAY_SOAK=20 makes each count twenty times what CI runs."""

from __future__ import annotations

import os

FACTOR = int(os.environ.get("KVRELAY_SOAK", "1"))
TIMEOUT_S = 180 * FACTOR  # for pytest's own limit on one test


def scaled(count: int) -> int:
    return count * FACTOR
