"""The steps of one answer's life, as far as they are kept."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from coordinator.lifetime import Edge, Stage
from kvrelay.explanation import MAX_STEPS, LifeStep
from kvrelay.types import RequestId

logger = logging.getLogger(__name__)

MAX_DETAIL_CHARS = 240
_NUM_OLDEST = MAX_STEPS // 2


class Steps:
    """Hears of every edge. Keeps the oldest and the newest; one that waits long tries for room again and again."""

    def __init__(self, request_id: RequestId, accepted_at: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._request_id = request_id
        self._accepted_at = accepted_at
        self._clock = clock
        self._oldest: list[LifeStep] = []
        self._newest: deque[LifeStep] = deque(maxlen=MAX_STEPS - _NUM_OLDEST)

    def take(self, edge: Edge, before: Stage | None, after: Stage, detail: str) -> None:
        """As Lifetime's on_edge."""
        step = LifeStep(self._clock() - self._accepted_at, edge.value, detail[:MAX_DETAIL_CHARS])
        logger.debug("%s: %s after %.3f s %s", self._request_id, step.edge, step.at_s, step.detail)
        if len(self._oldest) < _NUM_OLDEST:
            self._oldest.append(step)
        else:
            self._newest.append(step)

    def kept(self) -> tuple[LifeStep, ...]:
        """Oldest first."""
        return (*self._oldest, *self._newest)
