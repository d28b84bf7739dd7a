"""How much is set aside for an answer when it is admitted. Pure."""

from __future__ import annotations

from typing import Protocol

from bench.sim.load import Arrival
from coordinator.output_lengths import OutputLengths


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
    """coordinator.output_lengths: a quantile of the tenant's recent answers."""

    def __init__(self, quantile: float) -> None:
        self.name = f"expected, {quantile:g}"
        self._lengths = OutputLengths(quantile)

    def num_output(self, arrival: Arrival) -> int:
        return self._lengths.expected(arrival.tenant, arrival.max_tokens)

    def finished(self, arrival: Arrival) -> None:
        self._lengths.note(arrival.tenant, arrival.num_output)
