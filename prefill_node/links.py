"""Connections to decode nodes, kept between handoffs: a new one costs two round trips and a slow start.

What the handoffs on one connection have on the way is bounded together, by the pace of the link.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from kvrelay.errors import UnavailableError
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.credentials import ChannelTLS
from prefill_node.turns import Turns

MAX_IDLE_LINKS = 32  # decode nodes come and go under new addresses; those not seen for longest are let go


def open_own(address: str, tls: ChannelTLS | None = None) -> grpc.aio.Channel:
    """A channel whose connection no other shares: a fresh one does not wait out the reconnect delay of its past."""
    return open_channel(address, own_connection=True, tls=tls)


@dataclass(slots=True, eq=False)
class Link:
    """The connection to one decode node. Its users take turns; what is known of its pace ends with it."""

    channel: grpc.aio.Channel
    turns: Turns
    num_users: int = 0
    retired: bool = False  # takes no new user; closed by its last one


class DecodeLinks:
    """One channel for each decode node in use. Belongs to the event loop."""

    def __init__(
        self,
        slab_bytes: int,
        open_link: Callable[[str], grpc.aio.Channel] = open_own,
        max_idle: int = MAX_IDLE_LINKS,
        on_carried: Callable[[int, float], None] = lambda num_bytes, seconds: None,
    ) -> None:
        """`slab_bytes` is of the node's layout. `on_carried` hears what any link carried, as Pace's."""
        self._slab_bytes = slab_bytes
        self._open_link = open_link
        self._max_idle = max_idle
        self._on_carried = on_carried
        self._links: dict[str, Link] = {}  # least recently taken first

    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[Link]:
        """The node's link. One that turns out unavailable serves no later handoff: the next connects anew."""
        link = self._links.pop(address, None) or self._new_link(address)
        self._links[address] = link
        link.num_users += 1
        try:
            yield link
        except UnavailableError:
            self._retire(address, link)
            raise
        finally:
            link.num_users -= 1
            await self._close_idle(link)

    async def close(self) -> None:
        """Closes every channel, also those in use: their calls end cancelled."""
        links, self._links = self._links, {}
        await asyncio.gather(*(link.channel.close() for link in links.values()))

    def _new_link(self, address: str) -> Link:
        return Link(self._open_link(address), Turns(self._slab_bytes, self._on_carried))

    def _retire(self, address: str, link: Link) -> None:
        link.retired = True
        if self._links.get(address) is link:
            del self._links[address]

    async def _close_idle(self, link: Link) -> None:
        if link.retired and link.num_users == 0:
            await link.channel.close()
        idle = [(address, other) for address, other in self._links.items() if other.num_users == 0]
        for address, other in idle[: max(0, len(idle) - self._max_idle)]:
            del self._links[address]
            await other.channel.close()
