"""A node's places at all the coordinators it serves: they share no state, so each is joined, and lost, on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvrelay.cluster import NodeInfo, NodeStatus
from kvrelay.rpc.membership import Membership


class Memberships:
    """One membership an address, from `start` to `close`; none for a node that serves without a cluster."""

    def __init__(
        self, addresses: Sequence[str], info: NodeInfo, status: Callable[[], NodeStatus], *, interval_s: float = 0.5
    ) -> None:
        """As Membership."""
        self._members = [Membership(address, info, status, interval_s=interval_s) for address in addresses]

    async def wait_joined(self) -> None:
        """Returns when every coordinator has accepted the node."""
        for member in self._members:
            await member.wait_joined()

    def changed(self) -> None:
        """Sends a status to each now."""
        for member in self._members:
            member.changed()

    async def start(self) -> None:
        for member in self._members:
            await member.start()

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in self._members))
