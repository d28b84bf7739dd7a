"""Since when a role has no usable node; ends the waits that need one, wherever in the queue they stand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from kvrelay.errors import UnavailableError
from kvrelay.types import Role


class Presence:
    """Belongs to the event loop. Times are the loop's."""

    def __init__(self) -> None:
        self._absent_since: dict[Role, float] = {}
        self._waits: dict[asyncio.Timeout, _Wait] = {}

    def update(self, role: Role, is_there: bool, now: float) -> None:
        """Tells whether any node of a role is usable now."""
        if is_there == (role not in self._absent_since):
            return
        if is_there:
            del self._absent_since[role]
        else:
            self._absent_since[role] = now
        for guard, wait in self._waits.items():
            if not guard.expired():  # its wait is being ended, and has not come to it yet
                guard.reschedule(wait.deadline(self._absent_since))

    @asynccontextmanager
    async def needed(self, roles: Collection[Role], patience_s: float) -> AsyncIterator[None]:
        """Raises UnavailableError in the body once one of `roles` had no node for `patience_s`, all within it."""
        wait = _Wait(frozenset(roles), patience_s, asyncio.get_running_loop().time())
        guard = asyncio.timeout_at(wait.deadline(self._absent_since))
        try:
            async with guard:
                self._waits[guard] = wait
                try:
                    yield
                finally:
                    del self._waits[guard]
        except TimeoutError as error:
            if not guard.expired():
                raise
            raise UnavailableError(
                "every node that could run the request is gone or not ready, or has weight 0"
            ) from error


class _Wait:
    def __init__(self, roles: frozenset[Role], patience_s: float, began: float) -> None:
        self._roles = roles
        self._patience_s = patience_s
        self._began = began

    def deadline(self, absent_since: dict[Role, float]) -> float | None:
        """None while every role that is needed has a node."""
        since = min((absent_since[role] for role in self._roles if role in absent_since), default=None)
        return None if since is None else max(since, self._began) + self._patience_s
