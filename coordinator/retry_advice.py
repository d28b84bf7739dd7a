"""What those who find no room are told, tenant by tenant. Pure."""

from __future__ import annotations

from coordinator.last_heard import LastHeard
from coordinator.promises import MIN_RETRY_AFTER_S, Pace, Promises

MAX_GUESS_S = 30.0
_SMOOTHING = 0.1  # weight of the newest wait in the running mean
_MAX_IDLE_TENANTS = 1_000  # whose experience is kept


class _Experience:
    """Of one tenant."""

    def __init__(self) -> None:
        self.pace = Pace()
        self.promises = Promises()
        self.mean_wait_s = 0.0


class RetryAdvice:
    def __init__(self) -> None:
        self._by_tenant = LastHeard(_Experience, _MAX_IDLE_TENANTS)
        self._waiting: dict[str, None] = {}  # tenants
        self._lacks_room = False

    def wait_s(self, tenant: str) -> float:
        """What recent requests of the tenant waited, within bounds."""
        return min(max(self._by_tenant.of(tenant).mean_wait_s, MIN_RETRY_AFTER_S), MAX_GUESS_S)

    def num_kept(self, tenant: str, request_id: str, most_places: int, now: float, num_places: int = 1) -> int:
        """Places that a request of the tenant for so many has to leave free. Never more than half: were those to whom
        they are promised all gone, the others shall have enough to keep the cluster busy."""
        known = self._by_tenant.of(tenant)
        return min(known.promises.num_kept(request_id, known.pace, now, num_places), most_places // 2)

    def refused(self, tenant: str, request_id: str, num_places: int, num_tokens: int, now: float) -> float:
        """The delay in seconds to tell."""
        known = self._by_tenant.of(tenant)
        return known.promises.tell(request_id, num_places, num_tokens, known.pace, self.wait_s(tenant), now)

    def got_in(self, tenant: str, request_id: str) -> None:
        self._by_tenant.of(tenant).promises.forget(request_id)

    def waited(self, tenant: str, seconds: float) -> None:
        """An answer found room after so long."""
        known = self._by_tenant.of(tenant)
        known.mean_wait_s += _SMOOTHING * (seconds - known.mean_wait_s)

    def begin(self, tenant: str, now: float) -> None:
        """Somebody waits again."""
        self._waiting[tenant] = None
        pace = self._by_tenant.of(tenant).pace
        pace.begin(now)
        if self._lacks_room:
            pace.lack(now)

    def end(self, tenant: str, now: float) -> None:
        """Nobody of the tenant waits any more."""
        self._waiting.pop(tenant, None)
        self._by_tenant.of(tenant).pace.rest(now)

    def lack_room(self, now: float) -> None:
        """Somebody was refused room, for which all wait that wait."""
        if not self._lacks_room:
            self._lacks_room = True
            for tenant in self._waiting:
                self._by_tenant.of(tenant).pace.lack(now)

    def have_room(self, now: float) -> None:
        """Nobody is without it any more."""
        if self._lacks_room:
            self._lacks_room = False
            for tenant in self._waiting:
                self._by_tenant.of(tenant).pace.rest(now)

    def freed(self, tenant: str, num_tokens: int, now: float) -> None:
        """An answer that wanted so many tokens waits no more."""
        self._by_tenant.of(tenant).pace.freed(num_tokens, now)
