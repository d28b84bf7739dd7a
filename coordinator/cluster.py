"""The cluster as it is now: members kept current by a timer, what they have cached, and who hears of changes."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from coordinator.calibration import Calibration
from coordinator.circuits import Circuits, Party, answers
from coordinator.members import COMPUTING_ROLES, Member, Members
from coordinator.nodes import Nodes
from coordinator.prefix_index import MAX_BLOCKS, PrefixIndex
from coordinator.presence import Presence
from coordinator.stored_prefixes import StoredPrefixes
from kvrelay.cluster import CacheEvents, NodeInfo, NodeStatus
from kvrelay.errors import InvalidRequestError, KVRelayError, StaleError, UnavailableError
from kvrelay.types import BlockHash, InstanceId, Role

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.5  # until what found no room tries again although no status told of any


class Cluster:
    """Belongs to the event loop. `on_change` is called when there may be more room, or fewer nodes, than before."""

    def __init__(
        self,
        members: Members,
        nodes: Nodes,
        on_change: Callable[[], None],
        max_indexed_blocks: int = MAX_BLOCKS,
    ) -> None:
        self.members = members
        self.nodes = nodes
        self._on_change = on_change
        self.circuits = Circuits()
        self.presence = Presence()
        self.stored = StoredPrefixes(self._is_held, max_indexed_blocks)
        self.caches = {role: PrefixIndex(max_indexed_blocks, self.stored.given_up) for role in COMPUTING_ROLES}
        self.calibration = Calibration()
        self._guards: defaultdict[InstanceId, set[asyncio.Timeout]] = defaultdict(set)
        self._ends_streams = False
        self._timer: asyncio.TimerHandle | None = None
        self._second_look: asyncio.TimerHandle | None = None

    def join(self, info: NodeInfo) -> Member:
        """What was at its address before has made way. Raises as Members.join."""
        member = self.members.join(info, self._now())
        if info.role in self.caches:
            self.caches[info.role].joined(info.instance_id, self._now())
        logger.info("%s %s joined as %s", info.role.value, info.address, info.instance_id)
        self._set_timer()
        return member

    def make_way(self, info: NodeInfo) -> None:
        """A process has started where this node is: what was there before is gone. Raises UnavailableError where that
        is alive, so that one of the two has a wrong address."""
        past = self.members.past_of(info)
        if past is None:
            return
        if past.is_alive(self._now()):
            raise UnavailableError(
                f"{info.address} is where {past.info.role.value} {past.info.instance_id} is, which is alive: give each "
                "node an --advertise of its own, or stop that one"
            )
        self._lose(past, "was replaced by a new process")

    def update(self, member: Member, status: NodeStatus) -> None:
        """Raises StaleError when the node is no member any more."""
        if self.members.update(member, status, self._now()):
            self._change()

    def cache_told(self, member: Member, told: CacheEvents) -> bool:
        """Notes what became of its cached blocks; whether it has to tell of all of them, since it or we lost count.

        Raises StaleError when the node is no member any more, InvalidRequestError for one that has no such blocks.
        """
        if not self.members.has(member):
            raise StaleError(f"{member.info.role.value} {member.info.address} is not a member any more; join again")
        if member.info.role not in self.caches:
            raise InvalidRequestError(f"a {member.info.role.value} has no cached blocks to tell of")
        return self.caches[member.info.role].apply(member.info.instance_id, told, self._now())

    def disconnect(self, member: Member) -> None:
        """Its Join stream ended: nothing new goes there until it joins again; the work it does for us goes on until its
        own stream breaks, or the node was silent for too long."""
        if self.members.has(member) and not self._ends_streams:
            how, level = ("ended", logging.INFO) if member.status.draining else ("broke", logging.WARNING)
            name = f"{member.info.role.value} {member.info.address}"
            logger.log(level, "%s left: its stream %s; it gets nothing new", name, how)
        self.members.disconnect(member)
        self._change()

    def will_end_streams(self) -> None:
        """This coordinator stops: that Join streams end is no news of their nodes any more."""
        self._ends_streams = True

    def look_again(self) -> None:
        """A request found no room. Soon it is worth another try, whatever the nodes tell: one that could not be
        reached has nothing to tell, and what was full for a moment may be as before in its next status."""
        if self._second_look is None:
            self._second_look = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._on_second_look)

    def cached(self, role: Role, hashes: Sequence[BlockHash]) -> dict[InstanceId, int]:
        """Leading blocks that each node of a role probably has."""
        return self.caches[role].match(hashes, self._now())

    def assigned(self, member: Member, hashes: Sequence[BlockHash], num_tokens: int = 0) -> None:
        """A request went there, with so many tokens of its prompt to compute: one more until its next status tells, and
        its blocks will be cached there."""
        member.assign(num_tokens)
        self.caches[member.info.role].assigned(member.info.instance_id, hashes, self._now())

    def refused(self, member: Member, hashes: Sequence[BlockHash]) -> None:
        """It did not take a request that was assigned to it."""
        self.caches[member.info.role].refused(member.info.instance_id, hashes)

    @contextmanager
    def trying(self, *members: Member) -> Iterator[None]:
        """A request goes to this node, or by the link between these two. One that is cancelled in the body, or refused
        by a node in order, leaves it to the next one to show whether a failure is over."""
        self.circuits.trying(_party(members), self._now())
        try:
            yield
        except asyncio.CancelledError:
            self.withdraw(*members)
            raise
        except KVRelayError as error:
            if answers(error):
                self.withdraw(*members)
            raise

    def withdraw(self, *members: Member) -> None:
        """A request tried there and ended before it showed how they do."""
        self.circuits.withdraw(_party(members), self._now())

    def succeeded(self, *members: Member) -> None:
        self.circuits.succeeded(_party(members))

    def failed(self, error: KVRelayError, *members: Member) -> None:
        """Counts `error` against this node, or the link between these two, if it is anyone's fault.

        Not against one that is lost, or known to be leaving: it is not asked anyway."""
        if not all(self.members.is_usable(member.info.instance_id) for member in members):
            return
        if self.circuits.failed(_party(members), error, self._now()):
            names = " and ".join(f"{member.info.role.value} {member.info.address}" for member in members)
            what = f"the link between {names}" if len(members) > 1 else names
            logger.warning("%s failed again and is asked last for now: %s", what, error)

    def suspects(self) -> set[Party]:
        """Nodes, and links between two, that failed lately."""
        return self.circuits.suspects(self._now())

    @asynccontextmanager
    async def while_member(self, member: Member) -> AsyncIterator[None]:
        """Raises UnavailableError in the body as soon as the node is lost, however silent its connection is."""
        guards = self._guards[member.info.instance_id]
        try:
            async with asyncio.timeout(None) as guard:
                guards.add(guard)
                yield
        except TimeoutError as error:
            if not guard.expired():
                raise
            raise UnavailableError(f"{member.info.role.value} {member.info.address} is lost") from error
        finally:
            guards.discard(guard)
            if not guards:
                self._guards.pop(member.info.instance_id, None)

    def close(self) -> None:
        for timer in (self._timer, self._second_look):
            if timer is not None:
                timer.cancel()
        self._timer = self._second_look = None

    def _is_held(self, key: int) -> bool:
        return any(cache.is_held(key) for cache in self.caches.values())

    def _on_second_look(self) -> None:
        self._second_look = None
        self._change()

    def _change(self) -> None:
        for role in COMPUTING_ROLES:
            self.presence.update(role, bool(self.members.num_usable(role)), self._now())
        self._on_change()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        expiry = self.members.next_expiry()
        if expiry is not None:
            self._timer = asyncio.get_running_loop().call_at(expiry, self._expire)

    def _expire(self) -> None:
        try:
            for member in self.members.expire(self._now()):
                self._lose(member, "was silent for too long")
        finally:
            self._set_timer()

    def _lose(self, member: Member, why: str) -> None:
        logger.warning("%s %s %s", member.info.role.value, member.info.address, why)
        self.members.remove(member)
        self.nodes.forget(member.info.address)
        self.circuits.forget(member.info.instance_id)
        if member.info.role in self.caches:
            self.caches[member.info.role].forget(member.info.instance_id)
        for guard in list(self._guards.get(member.info.instance_id, ())):
            if not guard.expired():  # it was lost before, and the work has not come to its end yet
                guard.reschedule(self._now())
        self._change()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _party(members: Sequence[Member]) -> Party:
    return tuple(member.info.instance_id for member in members)
