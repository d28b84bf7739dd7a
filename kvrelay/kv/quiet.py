"""Whether a node has requests in work: what can wait, waits for a moment when it has none."""

from __future__ import annotations

import asyncio


class Quiet:
    """Quiet from the start. Belongs to the event loop."""

    def __init__(self) -> None:
        self._quiet = asyncio.Event()
        self._quiet.set()

    def set(self, quiet: bool) -> None:
        if quiet:
            self._quiet.set()
        else:
            self._quiet.clear()

    async def wait(self, limit_s: float) -> None:
        """Returns when it is quiet, after `limit_s` at the latest."""
        if self._quiet.is_set():
            return
        try:
            async with asyncio.timeout(limit_s):
                await self._quiet.wait()
        except TimeoutError:
            return
