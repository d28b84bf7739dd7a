"""What one run measures, and how long."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Rows by the names that --rows takes. The coordinator alone, between made-up nodes and clients:
RELAY = "relay"
LATENCY = "latency"
REQUESTS = "requests"
REFUSALS = "refusals"
DECISIONS = "decisions"
# Policies side by side, on real clusters:
REAL_PLACEMENT = "real-placement"
REAL_RESERVATIONS = "real-reservations"
REAL_TARGETS = "real-targets"
REAL_OVERLOAD = "real-overload"
# And in virtual time, which needs no rounds:
SIM_PLACEMENT = "sim-placement"
SIM_RESERVATIONS = "sim-reservations"
SIM_TARGETS = "sim-targets"
SIM_OVERLOAD = "sim-overload"

ALONE_ROWS = (RELAY, LATENCY, REQUESTS, REFUSALS, DECISIONS)
REAL_ROWS = (REAL_PLACEMENT, REAL_RESERVATIONS, REAL_TARGETS, REAL_OVERLOAD)
SIM_ROWS = (SIM_PLACEMENT, SIM_RESERVATIONS, SIM_TARGETS, SIM_OVERLOAD)
ROWS = (*ALONE_ROWS, *REAL_ROWS, *SIM_ROWS)
GROUPS = {"alone": ALONE_ROWS, "real": REAL_ROWS, "sim": SIM_ROWS}


@dataclass(frozen=True, slots=True)
class Conversations:
    num_clients: int
    num_each: int  # one after another
    num_turns: int


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: --quick only shows that everything runs."""

    relay_s: float = 4.0
    latency_s: float = 5.0
    requests_s: float = 4.0
    num_refusals: int = 1_000
    num_decisions: int = 500
    conversations: Conversations = Conversations(6, 3, 4)
    num_to_know: int = 64  # requests by which it is found out how many a second a real cluster can do
    load_s: float = 10.0  # of each load of a real cluster
    overload_s: float = 30.0
    sim_requests: int = 400  # of a run in virtual time
    sim_overload_requests: int = 1_000  # for ten minutes; of fewer a part of that
    sim_slices: int = 3
    num_rounds: int = 3


QUICK = Effort(
    relay_s=0.5,
    latency_s=1.0,
    requests_s=0.5,
    num_refusals=50,
    num_decisions=20,
    conversations=Conversations(2, 1, 2),
    num_to_know=48,
    load_s=2.0,
    overload_s=4.0,
    sim_requests=100,
    sim_overload_requests=50,
    sim_slices=1,
    num_rounds=1,
)


@dataclass(frozen=True, slots=True)
class Setting:
    effort: Effort
    model: Path  # that real clusters serve; of the coordinator alone, whose tokenizer it has
