"""The books of one tier: which blocks are there, whose they are, how long they stay, which go first.

Pure: no bytes of blocks, no I/O, no clock. Times are seconds of a clock that never steps back, passed in.

A chain goes from its tail: while a block is here that follows another, the other one stays. So a look-up from the
root finds every block that is of use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvstore.block import BlockInfo
from kvstore.chains import Chains
from kvstore.deadlines import Deadlines
from kvstore.eviction import Place
from kvstore.quotas import Quotas
from kvstore.tenants import Tenants

NOT_PINNED = 0.0


@dataclass(slots=True)
class _Entry:
    info: BlockInfo
    num_bytes: int
    last_used: float
    hits: int
    pinned_until: float
    place: Place  # in its tenant's queue


class TierIndex:
    """`used_bytes` never exceeds `capacity_bytes`, nor what a tenant has its quota. One owner, one thread.

    `num_evictions` and `num_expired` count blocks since the start.
    """

    def __init__(self, capacity_bytes: int, quotas: Quotas) -> None:
        self.capacity_bytes = capacity_bytes
        self.quotas = quotas
        self.num_evictions = 0
        self.num_expired = 0
        self._entries: dict[bytes, _Entry] = {}
        self._chains = Chains()
        self._tenants = Tenants(capacity_bytes, quotas)
        self._expiries = Deadlines(self._expires_at)
        self._overdue: set[bytes] = set()  # came due while followed or pinned; looked at again once they may go
        self._pins = Deadlines(lambda key: self._entries[key].pinned_until)
        self._pinned: set[bytes] = set()

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._entries)

    @property
    def used_bytes(self) -> int:
        return self._tenants.used_bytes

    @property
    def num_pinned(self) -> int:
        """Blocks pinned by name, as of the last call that was told the time."""
        return len(self._pinned)

    def info(self, key: bytes) -> BlockInfo:
        """Raises KeyError, as do the four below, if the block is not here."""
        return self._entries[key].info

    def num_bytes(self, key: bytes) -> int:
        return self._entries[key].num_bytes

    def last_used(self, key: bytes) -> float:
        return self._entries[key].last_used

    def hits(self, key: bytes) -> int:
        return self._entries[key].hits

    def pinned_until(self, key: bytes) -> float:
        """NOT_PINNED where it is not; may be over already."""
        return self._entries[key].pinned_until

    def used_by(self, tenant: str) -> int:
        """Bytes."""
        return self._tenants.used_by(tenant)

    def tenants(self) -> Mapping[str, int]:
        """Bytes of each tenant that has a block here."""
        return {tenant: holdings.num_bytes for tenant, holdings in self._tenants}

    def make_room(self, num_bytes: int, tenant: str, now: float, keep: Collection[bytes] = ()) -> list[bytes] | None:
        """Forgets blocks until `num_bytes` more of `tenant` fit; returns their keys, followers first, to be dropped.

        First what has expired goes; then the tenant's own if it would exceed its quota; then, if the tier is full,
        those of whoever holds most. `keep` are blocks that must not go: the parents of what is to be added.

        None if room cannot be made (pinned blocks are in the way, or it is more than the quota or the tier);
        then nothing has changed.
        """
        if not self._tenants.could_fit(num_bytes, tenant):
            return None
        self._end_pins(now)
        expired = self._take_expired(now, keep)
        evicted = self._evict(num_bytes, tenant, keep)
        for key in keep:
            self._recheck(key)
        if evicted is None:
            self._reinstate(expired)
            return None
        self.num_expired += len(expired)
        self.num_evictions += len(evicted)
        self._remember_evicted(evicted)
        return [entry.info.key for entry in expired + evicted]

    def accepts(self, info: BlockInfo) -> bool:
        """Whether its place in its chain fits those of the blocks beside it that are here: places grow along a chain.

        Whoever computed a block says what it follows; what is said wrongly, or to do harm, could close a circle. Not
        by one alone: a sender that knows no chains puts each block at place 0, and others go on from there.
        """
        parent = self._entries.get(info.parent)
        follows = parent is None or parent.info.chain_index < info.chain_index
        followers = (self._entries[key].info for key in self._chains.followers(info.key))
        precedes = all(follower.chain_index > info.chain_index for follower in followers)
        return info.parent != info.key and follows and precedes

    def add(self, info: BlockInfo, num_bytes: int, used_at: float) -> None:
        """Takes the place of what is here under the same key.

        Raises ValueError if room was not made, or if it is not accepted.
        """
        if not self.accepts(info):
            raise ValueError(f"place {info.chain_index} of {info.key.hex()} does not fit those beside it in its chain")
        known = self._entries.get(info.key)
        if known is not None:
            self._forget(known)
        if not self._tenants.fits(num_bytes, info.tenant):
            if known is not None:
                self._reinstate([known])
            raise ValueError(f"{num_bytes} bytes do not fit: {self.used_bytes} of {self.capacity_bytes} are used")
        if known is None:
            self._remember(info, num_bytes, used_at)
        else:
            self._remember(info, num_bytes, used_at, known.hits, known.pinned_until)

    def restore(self, info: BlockInfo, num_bytes: int, last_used: float, hits: int) -> bool:
        """At start, a block of an earlier process, the least recently used first; False if it cannot be taken."""
        if info.key in self._entries or not self.accepts(info) or not self._tenants.fits(num_bytes, info.tenant):
            return False
        self._remember(info, num_bytes, last_used, hits)
        return True

    def hit(self, keys: Iterable[bytes], now: float) -> None:
        """A chain's blocks from its root on were used; those that are not here are passed over."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                continue
            entry.last_used = now
            entry.hits += 1
            self._tenants[entry.info.tenant].queue.hit(key, entry.place)

    def discard(self, key: bytes) -> list[bytes]:
        """Forgets the block and what follows it here, be it here itself or not, pinned or not; followers first."""
        keys = [here for here in self._chains.deepest_first(key) if here in self._entries]
        for gone in keys:
            self._forget(self._entries[gone])
        return keys

    def expire(self, now: float) -> list[bytes]:
        """Forgets the blocks whose time is over, but for the pinned and the followed; followers first."""
        self._end_pins(now)
        expired = self._take_expired(now)
        self.num_expired += len(expired)
        return [entry.info.key for entry in expired]

    def pin(self, keys: Iterable[bytes], until: float) -> int:
        """Those of `keys` that are here, and what they follow, stay until then; a time that is over unpins.

        Returns how many of the keys are here.
        """
        num_pinned = 0
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                continue
            num_pinned += 1
            self._unpin(entry)
            if until > NOT_PINNED:
                entry.pinned_until = until
                self._hold(entry)
        return num_pinned

    def select(
        self, *, tenant: str = "", namespace: bytes = b"", key: bytes = b"", unused_s: float | None = None, now: float
    ) -> list[bytes]:
        """Blocks that match every field given, followers first: of a tenant, of a namespace, `key` and what follows
        it, not used for longer than `unused_s`. To discard them takes along what follows them and did not match.
        """
        keys: Iterable[bytes] = self._entries
        if key:
            keys = self._chains.deepest_first(key) if key in self._entries else ()
        found = [
            entry
            for entry in map(self._entries.__getitem__, keys)
            if (not tenant or entry.info.tenant == tenant)
            and entry.info.key.startswith(namespace)
            and (unused_s is None or now - entry.last_used > unused_s)
        ]
        found.sort(key=lambda entry: entry.info.chain_index, reverse=True)
        return [entry.info.key for entry in found]

    def check(self) -> None:
        """Raises AssertionError unless the books agree with each other."""
        used: dict[str, int] = {}
        for key, entry in self._entries.items():
            used[entry.info.tenant] = used.get(entry.info.tenant, 0) + entry.num_bytes
            waits, free = key in self._tenants[entry.info.tenant].queue, self._is_free(entry)
            assert waits == free, f"{key.hex()} waits to be evicted: {waits}; may go: {free}"
            assert not (key in self._overdue and free), f"{key.hex()} is overdue, may go and is not due"
            assert (entry.pinned_until != NOT_PINNED) == (key in self._pinned)
        assert used == self.tenants(), f"tenants hold {used}, the books say {self.tenants()}"
        self._tenants.check()
        assert self._chains.num_edges() == len(self._entries)
        assert self._overdue <= self._entries.keys() >= self._pinned

    def _is_free(self, entry: _Entry) -> bool:
        """Whether it may go: nothing here follows it, nobody pinned it."""
        return entry.pinned_until == NOT_PINNED and self._chains.is_tail(entry.info.key)

    def _remember(
        self, info: BlockInfo, num_bytes: int, used_at: float, hits: int = 0, pinned_until: float = NOT_PINNED
    ) -> None:
        queue = self._tenants.add(num_bytes, info.tenant).queue
        parent = self._entries.get(info.parent)
        # What goes on with the tail of a chain that was used again is likely to be used again too. A new branch of a
        # shared prefix is not: that would make every prompt a reused one.
        continues = parent is not None and parent.place.reused and self._chains.is_tail(info.parent)
        place = queue.enter(info.key, reused=hits > 0 or continues)
        self._link(_Entry(info, num_bytes, used_at, hits, pinned_until, place))

    def _reinstate(self, entries: list[_Entry]) -> None:
        """Undoes `_forget`, called in this order."""
        for entry in reversed(entries):
            self._tenants.add(entry.num_bytes, entry.info.tenant).queue.reinstate(entry.info.key, entry.place)
            self._link(entry)

    def _link(self, entry: _Entry) -> None:
        """Enters a block that already is in its tenant's queue into the other books."""
        info = entry.info
        self._entries[info.key] = entry
        self._chains.link(info.key, info.parent)
        self._set_expiry(entry)
        if entry.pinned_until != NOT_PINNED:
            self._hold(entry)
        if not self._is_free(entry):
            self._suspend(entry)
        parent = self._entries.get(info.parent)
        if parent is not None:
            self._suspend(parent)
        self._tenants.settle(info.tenant)

    def _forget(self, entry: _Entry) -> None:
        info = entry.info
        del self._entries[info.key]
        self._chains.unlink(info.key, info.parent)
        self._tenants[info.tenant].queue.forget(info.key, entry.place)
        self._tenants.remove(entry.num_bytes, info.tenant)
        self._expiries.discard(info.key)
        self._overdue.discard(info.key)
        self._pins.discard(info.key)
        self._pinned.discard(info.key)
        self._recheck(info.parent)

    def _suspend(self, entry: _Entry) -> None:
        """It must not go now."""
        self._tenants[entry.info.tenant].queue.suspend(entry.info.key, entry.place)
        self._tenants.settle(entry.info.tenant)

    def _recheck(self, key: bytes) -> None:
        """A block that something kept may be free now."""
        entry = self._entries.get(key)
        if entry is None or not self._is_free(entry):
            return
        queue = self._tenants[entry.info.tenant].queue
        if key not in queue:
            queue.resume(key, entry.place)
            self._tenants.settle(entry.info.tenant)
        if key in self._overdue:
            self._overdue.remove(key)
            self._set_expiry(entry)

    def _evict(self, num_bytes: int, tenant: str, keep: Collection[bytes]) -> list[_Entry] | None:
        evicted: list[_Entry] = []
        while not self._tenants.fits(num_bytes, tenant):
            queue = self._tenants.gives_way(num_bytes, tenant)
            if queue is None:
                self._reinstate(evicted)
                return None
            entry = self._entries[queue.pop()]
            if entry.info.key in keep:
                self._tenants.settle(entry.info.tenant)
            else:
                self._forget(entry)
                evicted.append(entry)
        return evicted

    def _remember_evicted(self, entries: list[_Entry]) -> None:
        for entry in entries:
            holdings = self._tenants.get(entry.info.tenant)
            if holdings is not None:
                holdings.queue.remember_evicted(entry.info.key, entry.place)

    def _expires_at(self, key: bytes) -> float | None:
        entry = self._entries[key]
        return entry.last_used + entry.info.ttl_s if entry.info.ttl_s else None

    def _set_expiry(self, entry: _Entry) -> None:
        if entry.info.ttl_s:
            self._expiries.set(entry.info.key, entry.last_used + entry.info.ttl_s)

    def _take_expired(self, now: float, keep: Collection[bytes] = ()) -> list[_Entry]:
        expired: list[_Entry] = []
        due = self._expiries.pop_due(now)
        while due:
            for key in due:
                entry = self._entries[key]
                if key not in keep and self._is_free(entry):
                    self._forget(entry)  # which makes its parent due again if it is overdue
                    expired.append(entry)
                else:
                    self._overdue.add(key)
            due = self._expiries.pop_due(now)
        return expired

    def _hold(self, entry: _Entry) -> None:
        """What its pin means."""
        self._pinned.add(entry.info.key)
        self._pins.set(entry.info.key, entry.pinned_until)
        self._suspend(entry)

    def _unpin(self, entry: _Entry) -> None:
        entry.pinned_until = NOT_PINNED
        self._pinned.discard(entry.info.key)
        self._pins.discard(entry.info.key)
        self._recheck(entry.info.key)

    def _end_pins(self, now: float) -> None:
        for key in self._pins.pop_due(now):
            self._unpin(self._entries[key])
