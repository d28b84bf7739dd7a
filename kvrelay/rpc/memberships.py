"""A node's places at all the coordinators it serves: they share no state, so each is joined, and lost, on its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from kvrelay.cluster import NodeInfo, NodeStatus
from kvrelay.kv.named_blocks import NamedBlocks
from kvrelay.rpc.credentials import ChannelTLS
from kvrelay.rpc.membership import Membership
from kvrelay.types import InstanceId

logger = logging.getLogger(__name__)


class Memberships:
    """One membership an address, from `start` to `close`; none for a node that serves without a cluster.

    Two addresses may lead to one coordinator, where each Join would push the other out: the first one that joined
    stays, the other is given up.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        info: NodeInfo,
        status: Callable[[], NodeStatus],
        *,
        interval_s: float = 0.5,
        cached: NamedBlocks | None = None,
        tls: ChannelTLS | None = None,
    ) -> None:
        """As Membership."""
        self._coordinator_ids: dict[str, InstanceId] = {}  # by address: the one that was last joined by it
        self._members = [
            Membership(
                address,
                info,
                status,
                interval_s=interval_s,
                is_wanted=partial(self._is_first, address),
                cached=cached,
                tls=tls,
            )
            for address in addresses
        ]

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

    def _is_first(self, address: str, coordinator_id: InstanceId) -> bool:
        for other, other_id in self._coordinator_ids.items():
            if other_id == coordinator_id and other != address:
                logger.error(
                    "%s and %s lead to the same coordinator: this node joins it by the first alone; name it once",
                    other,
                    address,
                )
                return False
        self._coordinator_ids[address] = coordinator_id
        return True
