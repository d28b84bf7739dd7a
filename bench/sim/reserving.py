"""How much is set aside for an answer when it is admitted. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Protocol

from bench.sim.load import Arrival

NUM_RECENT = 256  # answers of a tenant by which the next ones are judged
MIN_RECENT = 16  # with fewer, all of max_tokens is set aside


class Reserving(Protocol):
    def num_output(self, arrival: Arrival) -> int:
        """Tokens of the answer to set aside, at most max_tokens."""
        ...

    def finished(self, arrival: Arrival) -> None:
        """An answer came to its end."""
        ...


class Full:
    """All that the answer may have: nobody is preempted."""

    name = "full"

    def num_output(self, arrival: Arrival) -> int:
        return arrival.max_tokens

    def finished(self, arrival: Arrival) -> None: ...


class Expected:
    """A quantile of the tenant's recent answers."""

    def __init__(self, quantile: float) -> None:
        self.name = f"expected, {quantile:g}"
        self._quantile = quantile
        self._recent: defaultdict[str, deque[int]] = defaultdict(lambda: deque(maxlen=NUM_RECENT))

    def num_output(self, arrival: Arrival) -> int:
        recent = self._recent[arrival.tenant]
        if len(recent) < MIN_RECENT:
            return arrival.max_tokens
        expected = sorted(recent)[min(len(recent) - 1, int(self._quantile * len(recent)))]
        return min(expected, arrival.max_tokens)

    def finished(self, arrival: Arrival) -> None:
        self._recent[arrival.tenant].append(arrival.num_output)
