"""A bit for each node, and back from a set of bits to the nodes it stands for. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvrelay.types import InstanceId

_MAX_REMEMBERED = 4_096


class NodeBits:
    """Low bits first, so that sets of nodes are short ints."""

    def __init__(self) -> None:
        self._ids: list[InstanceId | None] = []  # by number of the bit; None: nobody's now
        self._free: list[int] = []
        self._remembered: dict[int, Sequence[InstanceId]] = {}

    def take(self, instance_id: InstanceId) -> int:
        """A bit that nobody has, as an int with that bit set."""
        number = heapq.heappop(self._free) if self._free else len(self._ids)
        if number == len(self._ids):
            self._ids.append(instance_id)
        else:
            self._ids[number] = instance_id
        self._remembered.clear()
        return 1 << number

    def give_back(self, bit: int) -> None:
        number = bit.bit_length() - 1
        self._ids[number] = None
        heapq.heappush(self._free, number)
        self._remembered.clear()

    def ids(self, nodes: int) -> Sequence[InstanceId]:
        """Who is meant by these bits, all of which are taken."""
        found = self._remembered.get(nodes)
        if found is None:
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            found = self._remembered[nodes] = self._read(nodes)
        return found

    def _read(self, nodes: int) -> list[InstanceId]:
        digits = bin(nodes)
        last, position = len(digits) - 1, digits.find("1")
        found = []
        while position >= 0:
            instance_id = self._ids[last - position]
            if instance_id is not None:
                found.append(instance_id)
            position = digits.find("1", position + 1)
        return found
