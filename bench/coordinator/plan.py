"""What one run measures, and how long."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Rows by the names that --rows takes.
RELAY = "relay"
LATENCY = "latency"
REQUESTS = "requests"
REFUSALS = "refusals"
DECISIONS = "decisions"
ROWS = (RELAY, LATENCY, REQUESTS, REFUSALS, DECISIONS)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: --quick only shows that everything runs."""

    relay_s: float = 4.0
    latency_s: float = 5.0
    requests_s: float = 4.0
    num_refusals: int = 1_000
    num_decisions: int = 500
    num_rounds: int = 3


QUICK = Effort(0.5, 1.0, 0.5, 50, 20, 1)


@dataclass(frozen=True, slots=True)
class Setting:
    effort: Effort
    model: Path  # whose tokenizer the coordinator has
