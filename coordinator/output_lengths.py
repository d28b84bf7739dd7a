"""How long a tenant's answers are likely to get, from those that ended lately. Pure.

With `--reserve expected` a decode node sets aside the prompt and this much of the answer; one that gets longer grows,
and where there is no room to the youngest gives way. So a guess too low costs a preemption, one too high costs room.
"""

from __future__ import annotations

import bisect
import math
from collections import deque

from coordinator.last_heard import LastHeard

NUM_KEPT = 256  # of a tenant's last answers
MIN_ANSWERS = 20  # before that a tenant's own say nothing; all tenants' do, once they are as many
MAX_TENANTS = 1_000  # of many, those that are longest unheard of are forgotten


class _Lengths:
    """The last NUM_KEPT, in order of time and of size."""

    def __init__(self) -> None:
        self._by_age: deque[int] = deque()
        self._by_size: list[int] = []

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, num_tokens: int) -> None:
        if len(self._by_age) == NUM_KEPT:
            del self._by_size[bisect.bisect_left(self._by_size, self._by_age.popleft())]
        self._by_age.append(num_tokens)
        bisect.insort(self._by_size, num_tokens)

    def quantile(self, quantile: float) -> int:
        """The least length that so large a part of them did not exceed."""
        return self._by_size[max(0, math.ceil(quantile * len(self._by_size)) - 1)]


class OutputLengths:
    """Of one model. `quantile` in (0, 1] is the part of answers that shall fit into what is set aside for them."""

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._by_tenant = LastHeard(_Lengths, MAX_TENANTS)
        self._all = _Lengths()

    @property
    def num_tenants(self) -> int:
        return len(self._by_tenant)

    def note(self, tenant: str, num_tokens: int) -> None:
        """An answer of the tenant's ended by itself, or at its max_tokens, after so many tokens."""
        self._by_tenant.of(tenant).add(num_tokens)
        self._all.add(num_tokens)

    def expected(self, tenant: str, most: int) -> int:
        """Tokens to set aside for an answer of at most `most`; `most` as long as too few answers are known."""
        own = self._by_tenant.get(tenant)
        lengths = own if own is not None and len(own) >= MIN_ANSWERS else self._all
        return min(lengths.quantile(self._quantile), most) if len(lengths) >= MIN_ANSWERS else most
