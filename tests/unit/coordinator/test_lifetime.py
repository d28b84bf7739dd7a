"""The edges of a request's life."""

from __future__ import annotations

import pytest

from coordinator.lifetime import EDGES, Edge, Lifetime, Stage
from kvrelay.errors import KVRelayError


def taken(*edges: Edge) -> Lifetime:
    lifetime = Lifetime(lambda edge, before, after, detail: None)
    for edge in edges:
        lifetime.take(edge)
    return lifetime


HANDED_OVER = (Edge.ACCEPTED, Edge.TRIED, Edge.PREFILL_SENT, Edge.FIRST_TOKEN)


@pytest.mark.parametrize(
    ("edges", "stage"),
    [
        ((Edge.ACCEPTED,), Stage.QUEUED),
        ((Edge.ACCEPTED, Edge.TRIED, Edge.REFUSED, Edge.TRIED), Stage.RESERVING),
        ((*HANDED_OVER, Edge.FINISHED), Stage.ENDED),
        ((Edge.ACCEPTED, Edge.TRIED, Edge.TAIL_SENT, Edge.FIRST_TOKEN), Stage.DECODING),
        ((*HANDED_OVER, Edge.RESUMED, Edge.TRIED, Edge.PREFILL_SENT, Edge.FIRST_TOKEN), Stage.DECODING),
        ((Edge.ACCEPTED, Edge.TRIED, Edge.PREFILL_SENT, Edge.PREFILL_RETRIED, Edge.FIRST_TOKEN), Stage.DECODING),
        ((Edge.ACCEPTED, Edge.CANCELLED), Stage.ENDED),
        ((Edge.ACCEPTED, Edge.TRIED, Edge.FAILED), Stage.ENDED),
    ],
)
def test_lives(edges: tuple[Edge, ...], stage: Stage) -> None:
    assert taken(*edges).stage is stage


@pytest.mark.parametrize(
    ("edges", "wrong"),
    [
        ((), Edge.TRIED),
        ((Edge.ACCEPTED,), Edge.FIRST_TOKEN),
        ((Edge.ACCEPTED, Edge.CANCELLED), Edge.FAILED),
        ((*HANDED_OVER, Edge.FINISHED), Edge.FINISHED),
        ((*HANDED_OVER,), Edge.PREFILL_RETRIED),
    ],
)
def test_what_cannot_happen(edges: tuple[Edge, ...], wrong: Edge) -> None:
    lifetime = taken(*edges)
    with pytest.raises(KVRelayError, match=wrong.value):
        lifetime.take(wrong)


def test_every_edge_is_drawn_and_every_edge_is_heard() -> None:
    assert set(EDGES) == set(Edge)
    heard: list[tuple[Edge, Stage | None, Stage, str]] = []
    lifetime = Lifetime(lambda edge, before, after, detail: heard.append((edge, before, after, detail)))
    lifetime.take(Edge.ACCEPTED, "8 prompt tokens")
    lifetime.take(Edge.TRIED)
    assert heard == [
        (Edge.ACCEPTED, None, Stage.QUEUED, "8 prompt tokens"),
        (Edge.TRIED, Stage.QUEUED, Stage.RESERVING, ""),
    ]
