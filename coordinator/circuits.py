"""Which nodes, and which links between a prefill and a decode node, failed lately: asked last for a while. Pure.

A party is named by its instance: `(node,)`, or `(prefill node, decode node)` for what lies between the two. The first
requests that meet a failure pay for it; once a circuit is open the next ones go elsewhere, and one at a time tries
whether it is over. Nothing is ever refused here: where every way is suspect, the best of them is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.errors import (
    BadLogitsError,
    CancelledError,
    CorruptBlockError,
    DeadlineError,
    HandoffFailedError,
    InvalidRequestError,
    KVRelayError,
    NotFoundError,
    OverloadedError,
    StaleError,
)
from kvrelay.kv.circuit import Circuit
from kvrelay.types import InstanceId

Party = tuple[InstanceId, ...]  # one node, or a prefill and a decode node

# None of these tells of a broken peer: the request itself is wrong, or the peer is busy or right to refuse.
# Nor does a deadline: a peer whose interpreter is busy for seconds misses it, and keepalive finds one that is gone.
_NO_FAULT = (
    InvalidRequestError,
    OverloadedError,
    CancelledError,
    NotFoundError,
    StaleError,
    BadLogitsError,
    DeadlineError,
)


def is_fault(error: KVRelayError) -> bool:
    """Whether `error` counts against whoever gave it."""
    return not isinstance(error, _NO_FAULT)


def answers(error: KVRelayError) -> bool:
    """Whether what gave `error` is in order as far as that shows: busy, say. What missed a deadline may not be."""
    return not is_fault(error) and not isinstance(error, DeadlineError)


def failed_between(error: KVRelayError) -> bool:
    """Whether a prefill node's `error` tells of the way to the decode node, and not of itself."""
    return isinstance(error, HandoffFailedError | CorruptBlockError)


@dataclass(slots=True)
class Circuits:
    """Times are monotonic seconds. A party without failures costs nothing."""

    _circuits: dict[Party, Circuit] = field(default_factory=dict)

    def suspects(self, now: float) -> set[Party]:
        """All that should be asked last now. Changes nothing."""
        return {party for party, circuit in self._circuits.items() if circuit.blocks(now)}

    def trying(self, party: Party, now: float) -> None:
        """A request is on its way: while half-open it is the trial, and the others go elsewhere."""
        circuit = self._circuits.get(party)
        if circuit is not None:
            circuit.allows(now)

    def withdraw(self, party: Party, now: float) -> None:
        """The request ended before it showed how the party does: if it was the trial, the next one tries."""
        circuit = self._circuits.get(party)
        if circuit is not None:
            circuit.withdraw(now)

    def succeeded(self, party: Party) -> None:
        self._circuits.pop(party, None)

    def failed(self, party: Party, error: KVRelayError, now: float) -> bool:
        """True if this failure opened the circuit. What is nobody's fault does not count."""
        return is_fault(error) and self._circuits.setdefault(party, Circuit()).failed(now)

    def forget(self, instance_id: InstanceId) -> None:
        """The process is gone, and what it failed at says nothing of the next one."""
        for party in [party for party in self._circuits if instance_id in party]:
            del self._circuits[party]

    @property
    def num_open(self) -> int:
        """Half-open ones included; may be read by another thread."""
        return sum(circuit.is_open for circuit in list(self._circuits.values()))
