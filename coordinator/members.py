"""Which nodes there are: a registry fed by their Join streams. Pure; times are monotonic seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from coordinator.evened_rates import EvenedRates
from coordinator.node_load import load_of
from kvrelay.cluster import ModelInfo, NodeInfo, NodeRates, NodeStatus
from kvrelay.errors import ForeignBlockError, InvalidRequestError, StaleError
from kvrelay.types import InstanceId, Role

PROTOCOL_VERSION = 1
NO_STATUS = "joined, and has not said yet how it is"
DISCONNECTED = "its connection to the coordinator has ended"
ALIVE_S = 2.0  # a node says twice a second how it is
COMPUTING_ROLES = (Role.PREFILL_NODE, Role.DECODE_NODE)


class Member:
    """One node. `load` is what it comes to: worked out when it changes, so that whoever looks at all nodes finds it
    ready."""

    __slots__ = ("info", "is_connected", "last_seen", "load", "rates")

    def __init__(self, info: NodeInfo, status: NodeStatus, last_seen: float) -> None:
        self.info = info
        self.last_seen = last_seen
        self.is_connected = True  # until its Join stream ends
        self.rates: NodeRates | None = None  # what counts of what it measured from its next status on; None: all
        self.load = load_of(status, rates=self.rates)

    @property
    def status(self) -> NodeStatus:
        """Its last one; a new one tells of all that it was sent before."""
        return self.load.status

    @status.setter
    def status(self, status: NodeStatus) -> None:
        self.load = load_of(status, rates=self.rates)

    def assign(self, num_tokens: int) -> None:
        """One request more is sent there, with so many uncached tokens of its prompt to compute."""
        node = self.load
        self.load = load_of(node.status, (*node.assigned, num_tokens), self.rates)

    def is_alive(self, now: float) -> bool:
        """Demonstrably: its stream is open, as that of a machine that is gone may be for a while, and it was heard of
        lately, as a process that was killed may have been."""
        return self.is_connected and now - self.last_seen < ALIVE_S

    @property
    def usable(self) -> bool:
        """Takes new work."""
        status = self.status
        return status.ready and not status.draining and status.weight > 0

    @property
    def is_cordoned(self) -> bool:
        """Ready, and takes nothing new only because its weight is 0."""
        return self.status.ready and not self.status.draining and not self.status.weight


class Members:
    """Who joined and is not silent for longer than `timeout_s`.

    All prefill and decode nodes serve the same weights in the same layout: the first to join settles which, for as
    long as any is a member. `min_vocab_size` is the tokenizer's: a smaller model could not read its ids.
    """

    def __init__(self, *, timeout_s: float, min_vocab_size: int = 0, uses_rates: bool = True) -> None:
        """`uses_rates` False: what nodes measured of themselves counts for nothing."""
        self._timeout_s = timeout_s
        self._min_vocab_size = min_vocab_size
        self._members: dict[InstanceId, Member] = {}
        self._usable: dict[Role, dict[InstanceId, Member]] = {role: {} for role in Role}
        self._rates = {role: EvenedRates() for role in Role}
        self._uses_rates = uses_rates

    def join(self, info: NodeInfo, now: float) -> Member:
        """Takes a node in, not ready until its first status; what joins again replaces what it was.

        Raises InvalidRequestError (protocol, fields), ForeignBlockError (other weights or layout), each saying what
        differs.
        """
        self._check(info)
        before = self._members.get(info.instance_id)
        status = replace(before.status if before else NodeStatus(), ready=False, not_ready_reason=NO_STATUS)
        member = Member(info, status, now)
        self._members[info.instance_id] = member
        self._note(member)
        return member

    def past_of(self, info: NodeInfo) -> Member | None:
        """The member that this node, just started, replaces: another process at the same address, of whatever role."""
        for member in self.all():
            if member.info.address == info.address and member.info.instance_id != info.instance_id:
                return member
        return None

    def update(self, member: Member, status: NodeStatus, now: float) -> bool:
        """Notes a status; True when it may mean more room. Raises StaleError when the node is no member."""
        if not self.has(member):
            raise StaleError(f"{member.info.role.value} {member.info.address} is not a member any more; join again")
        # How fast it is and how much it has to compute changes with every step, and makes no room.
        was = member.status
        told = replace(
            status,
            rates=was.rates,
            num_waiting_tokens=was.num_waiting_tokens,
            step_tokens=was.step_tokens,
            prompt_tokens=was.prompt_tokens,
        )
        changed = was != told or bool(member.load.assigned)
        member.rates = self._rates_of(member, status, now)
        member.status, member.last_seen = status, now
        self._note(member)
        return changed

    def has(self, member: Member) -> bool:
        """Whether it is the current one of its process: not lost, nor replaced when its process joined again."""
        return self._members.get(member.info.instance_id) is member

    def disconnect(self, member: Member) -> None:
        """Its Join stream ended. Not ready from now on, and gone in a while unless it joins again before."""
        member.is_connected = False
        member.status = replace(member.status, ready=False, not_ready_reason=DISCONNECTED)
        self._note(member)

    def remove(self, member: Member) -> None:
        """Its process is gone."""
        if self.has(member):
            del self._members[member.info.instance_id]
            self._usable[member.info.role].pop(member.info.instance_id, None)
            self._rates[member.info.role].forget(member.info.instance_id)

    def expire(self, now: float) -> list[Member]:
        """Drops and returns the members that were silent for too long."""
        silent = [member for member in self.all() if now - member.last_seen >= self._timeout_s]
        for member in silent:
            self.remove(member)
        return silent

    def next_expiry(self) -> float | None:
        """When `expire` may next have something to do."""
        return min((member.last_seen + self._timeout_s for member in self.all()), default=None)

    def all(self) -> list[Member]:
        return list(self._members.values())

    def usable(self, role: Role) -> list[Member]:
        """Members of a role that are ready, not draining and have a weight above 0."""
        return list(self._usable[role].values())

    def num_usable(self, role: Role) -> int:
        """How many those are."""
        return len(self._usable[role])

    @property
    def why_not_ready(self) -> str:
        """Empty while a prefill and a decode node are usable."""
        missing = [role for role in COMPUTING_ROLES if not self.num_usable(role)]
        cordoned = [role for role in missing if any(member.is_cordoned for member in self._of(role))]
        absent = [role for role in missing if role not in cordoned]
        reasons = []
        if absent:
            reasons.append(f"no {' and no '.join(role.value for role in absent)} is ready")
        reasons += [f"every {role.value} that is ready has weight 0" for role in cordoned]
        return " and ".join(reasons)

    def is_usable(self, instance_id: InstanceId) -> bool:
        """Whether this process is a member that takes new work."""
        member = self._members.get(instance_id)
        return member is not None and member.usable

    def largest_pool(self, role: Role) -> int:
        """Blocks of the largest pool of a role, ready or not; 0 when none is known."""
        return max((member.status.blocks.total for member in self._of(role)), default=0)

    @property
    def model(self) -> ModelInfo | None:
        """What the prefill and decode nodes serve; None while there are none."""
        return next((member.info.model for member in self.all() if member.info.model is not None), None)

    def _rates_of(self, member: Member, status: NodeStatus, now: float) -> NodeRates:
        if not self._uses_rates:
            return NodeRates()
        return self._rates[member.info.role].told(member.info.instance_id, status, now)

    def _note(self, member: Member) -> None:
        """Its status may have changed, if it is still a member: the usable ones are looked for far more often."""
        if not self.has(member):
            return
        usable = self._usable[member.info.role]
        if member.usable:
            usable[member.info.instance_id] = member
        else:
            usable.pop(member.info.instance_id, None)

    def _of(self, role: Role) -> Iterable[Member]:
        return (member for member in self._members.values() if member.info.role is role)

    def _check(self, info: NodeInfo) -> None:
        if info.protocol_version != PROTOCOL_VERSION:
            raise InvalidRequestError(
                f"{info.address} speaks protocol version {info.protocol_version}; this coordinator speaks "
                f"{PROTOCOL_VERSION}: run the same kvrelay release on both"
            )
        if not info.instance_id or not info.address:
            raise InvalidRequestError("a node joins with an instance id and an address; one of them is empty")
        if info.role in COMPUTING_ROLES:
            self._check_model(info)

    def _check_model(self, info: NodeInfo) -> None:
        if info.model is None:
            raise InvalidRequestError(f"{info.role.value} {info.address} joins without saying which model it serves")
        if info.model.vocab_size < self._min_vocab_size:
            raise ForeignBlockError(
                f"{info.address} serves {info.model.name} with {info.model.vocab_size} token ids, but the "
                f"coordinator's tokenizer has {self._min_vocab_size}: give both the same model"
            )
        ours = self.model
        if ours is None:
            return
        for what, theirs, expected in _identities(info.model, ours):
            if theirs != expected:
                raise ForeignBlockError(
                    f"{info.address} serves {info.model.name} with {what} {theirs}, but this cluster's is {expected}: "
                    "start it with the same model file, dtype and block size"
                )


def _identities(theirs: ModelInfo, ours: ModelInfo) -> list[tuple[str, object, object]]:
    return [
        ("model fingerprint", theirs.fingerprint, ours.fingerprint),
        ("KV layout fingerprint", theirs.layout.fingerprint, ours.layout.fingerprint),
        ("model length", theirs.max_model_len, ours.max_model_len),
        ("vocabulary size", theirs.vocab_size, ours.vocab_size),
    ]
