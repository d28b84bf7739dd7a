"""What the nodes of one role measured of themselves, evened out. Pure; times are monotonic seconds.

Equal nodes measure different speeds, since each measures on the work that it happened to get. Taken as they are, these
send every request of a quiet cluster to the same node, and one that measured badly once gets no work to measure again.
So what differs from the others by less than NOISE is taken for the same, what differs more counts by that much less,
and a node that had nothing to do for IDLE_S counts as the others until it has worked.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import islice

from kvrelay.cluster import NodeRates, NodeStatus
from kvrelay.types import InstanceId

NOISE = 2.0  # a factor: what a busy machine makes of one and the same step
IDLE_S = 30.0
NUM_ASKED = 16  # nodes whose median is what is usual
_NAMES = tuple(field.name for field in dataclasses.fields(NodeRates))


class EvenedRates:
    """Of one role and model."""

    def __init__(self) -> None:
        self._told: dict[InstanceId, NodeRates] = {}
        self._idle_since: dict[InstanceId, float] = {}

    def told(self, instance_id: InstanceId, status: NodeStatus, now: float) -> NodeRates:
        """What counts of a node that says this of itself now. What it did not measure stays 0."""
        self._told[instance_id] = status.rates
        if status.num_running or status.num_waiting or status.num_reservations:
            self._idle_since.pop(instance_id, None)
            noise = NOISE
        else:
            since = self._idle_since.setdefault(instance_id, now)
            noise = NOISE if now - since < IDLE_S else math.inf
        return NodeRates(**{name: _even(getattr(status.rates, name), self._usual(name), noise) for name in _NAMES})

    def forget(self, instance_id: InstanceId) -> None:
        """It is no member any more."""
        self._told.pop(instance_id, None)
        self._idle_since.pop(instance_id, None)

    def _usual(self, name: str) -> float:
        """The median of a few that measured it: of the two in the middle what is between them by factor. 0 without."""
        known = (getattr(rates, name) for rates in self._told.values())
        few = sorted(islice((value for value in known if 0 < value < math.inf), NUM_ASKED))
        return math.sqrt(few[(len(few) - 1) // 2] * few[len(few) // 2]) if few else 0.0


def _even(value: float, usual: float, noise: float) -> float:
    if not value or not usual:
        return value
    if usual / noise <= value <= usual * noise:
        return usual
    return value * noise if value < usual else value / noise
