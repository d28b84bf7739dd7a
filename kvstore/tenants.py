"""What each tenant holds of a tier, and whose block goes next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.eviction import EvictionQueue
from kvstore.quotas import NO_BOUND, Quotas

# How finely holdings are told apart when the tier is full: those that differ by less than this part are equal.
LEVELS = 1024


@dataclass(slots=True)
class Holdings:
    """One tenant's."""

    num_bytes: int = 0
    queue: EvictionQueue = field(default_factory=EvictionQueue)
    level: int | None = None  # None: nothing of it may go


_NOTHING = Holdings()


class Tenants:
    """`used_bytes` is what all of them hold. Every call but iteration takes O(1) steps, however many there are."""

    def __init__(self, capacity_bytes: int, quotas: Quotas) -> None:
        self.used_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._quotas = quotas
        self._holdings: dict[str, Holdings] = {}
        self._levels: list[dict[str, None]] = [{} for _ in range(LEVELS + 1)]
        self._occupied = 0  # a bit for each level that has tenants

    def __iter__(self) -> Iterator[tuple[str, Holdings]]:
        return iter(self._holdings.items())

    def __getitem__(self, tenant: str) -> Holdings:
        """Raises KeyError if the tenant holds nothing."""
        return self._holdings[tenant]

    def get(self, tenant: str) -> Holdings | None:
        return self._holdings.get(tenant)

    def used_by(self, tenant: str) -> int:
        """Bytes."""
        holdings = self._holdings.get(tenant)
        return 0 if holdings is None else holdings.num_bytes

    def could_fit(self, num_bytes: int, tenant: str) -> bool:
        """Whether so much fits if nothing else is here."""
        return num_bytes <= self._capacity_bytes and self._within_quota(num_bytes, tenant)

    def fits(self, num_bytes: int, tenant: str) -> bool:
        """Whether so much more fits now."""
        fits_tier = self.used_bytes + num_bytes <= self._capacity_bytes
        return fits_tier and self._within_quota(self.used_by(tenant) + num_bytes, tenant)

    def add(self, num_bytes: int, tenant: str) -> Holdings:
        holdings = self._holdings.setdefault(tenant, Holdings())
        holdings.num_bytes += num_bytes
        self.used_bytes += num_bytes
        return holdings

    def remove(self, num_bytes: int, tenant: str) -> None:
        holdings = self._holdings[tenant]
        holdings.num_bytes -= num_bytes
        self.used_bytes -= num_bytes
        self.settle(tenant)
        if not holdings.num_bytes:
            del self._holdings[tenant]

    def gives_way(self, num_bytes: int, tenant: str) -> EvictionQueue | None:
        """Where the next block comes from so that `num_bytes` more of `tenant` fit; None if no block may go.

        While the tenant would exceed its quota it pays for that itself. Else whoever holds most does, what is to be
        added counted in: that is who is furthest over an equal share, so a tenant within its share loses nothing.
        """
        own = self._holdings.get(tenant, _NOTHING)
        wanted_bytes = own.num_bytes + num_bytes
        if not self._within_quota(wanted_bytes, tenant):
            return own.queue or None
        highest = self._occupied.bit_length() - 1
        if highest < 0:
            return None
        if own.queue and self._level(wanted_bytes) >= highest:
            return own.queue
        return self._holdings[next(iter(self._levels[highest]))].queue

    def settle(self, tenant: str) -> None:
        """To be called when a tenant's bytes or queue have changed."""
        holdings = self._holdings[tenant]
        level = self._level(holdings.num_bytes) if holdings.queue else None
        if level == holdings.level:
            return
        if holdings.level is not None:
            left = self._levels[holdings.level]
            del left[tenant]
            if not left:
                self._occupied &= ~(1 << holdings.level)
        if level is not None:
            self._levels[level][tenant] = None
            self._occupied |= 1 << level
        holdings.level = level

    def check(self) -> None:
        """Raises AssertionError unless the books agree with each other."""
        assert sum(held.num_bytes for _, held in self) == self.used_bytes <= self._capacity_bytes
        for tenant, held in self:
            assert held.num_bytes > 0
            assert self._within_quota(held.num_bytes, tenant), f"{tenant!r} exceeds its quota: {held.num_bytes}"
            assert bool(held.queue) == (held.level is not None)
        levels = {tenant: level for level, tenants in enumerate(self._levels) for tenant in tenants}
        assert levels == {tenant: held.level for tenant, held in self if held.level is not None}
        assert self._occupied == sum(1 << level for level in set(levels.values()))

    def _level(self, num_bytes: int) -> int:
        return num_bytes * LEVELS // self._capacity_bytes

    def _within_quota(self, num_bytes: int, tenant: str) -> bool:
        quota = self._quotas.of(tenant)
        return quota == NO_BOUND or num_bytes <= quota
