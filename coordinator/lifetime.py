"""The stages of an answer's life and the edges between them, named once for metrics, logs and tests. Pure.

A request for one answer lives as long as it; one for several has as many lives.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from kvrelay.errors import KVRelayError


class Stage(Enum):
    """Where a request is. `num_waiting` of the coordinator counts QUEUED and RESERVING, `num_running` the next two."""

    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


class Edge(Enum):
    ACCEPTED = "accepted"
    TRIED = "tried"  # its turn to ask for room
    REFUSED = "refused"  # no room now, back to its place in the queue
    PREFILL_SENT = "prefill_sent"
    TAIL_SENT = "tail_sent"  # the decode node computes the little that it lacks
    PREFILL_RETRIED = "prefill_retried"  # on another prefill node, under the same reservation
    FIRST_TOKEN = "first_token"
    RESUMED = "resumed"  # its decode node is lost: room is wanted elsewhere
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


_RUNNING = (Stage.PREFILLING, Stage.DECODING)
_ALIVE = (Stage.QUEUED, Stage.RESERVING, *_RUNNING)

EDGES: dict[Edge, tuple[tuple[Stage | None, ...], Stage]] = {
    Edge.ACCEPTED: ((None,), Stage.QUEUED),
    Edge.TRIED: ((Stage.QUEUED,), Stage.RESERVING),
    Edge.REFUSED: ((Stage.RESERVING, Stage.PREFILLING), Stage.QUEUED),
    Edge.PREFILL_SENT: ((Stage.RESERVING,), Stage.PREFILLING),
    Edge.TAIL_SENT: ((Stage.RESERVING,), Stage.PREFILLING),
    Edge.PREFILL_RETRIED: ((Stage.PREFILLING,), Stage.PREFILLING),
    Edge.FIRST_TOKEN: ((Stage.PREFILLING,), Stage.DECODING),
    Edge.RESUMED: (_RUNNING, Stage.QUEUED),
    Edge.FINISHED: (_RUNNING, Stage.ENDED),
    Edge.FAILED: (_ALIVE, Stage.ENDED),
    Edge.CANCELLED: (_ALIVE, Stage.ENDED),
}

OnEdge = Callable[[Edge, "Stage | None", Stage, str], None]


class Lifetime:
    """One answer's stage. `on_edge` hears of every edge taken, with the stages before and after it and a detail."""

    def __init__(self, on_edge: OnEdge) -> None:
        self._on_edge = on_edge
        self.stage: Stage | None = None

    def take(self, edge: Edge, detail: str = "") -> None:
        """`detail` is for people: where to, or why. Raises KVRelayError when the edge does not start here: a fault of
        ours."""
        sources, target = EDGES[edge]
        if self.stage not in sources:
            raise KVRelayError(f"a request cannot be {edge.value} while {self.stage and self.stage.value}")
        before, self.stage = self.stage, target
        self._on_edge(edge, before, target, detail)
