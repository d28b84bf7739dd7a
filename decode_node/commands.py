"""What the node has its engine do for a reservation, and what becomes of that when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from decode_node.engine import DecodeCore
from kvrelay.engine.loop import EngineLoop
from kvrelay.errors import KVRelayError, UnavailableError
from kvrelay.types import ReservationId

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Commands:
    """Belongs to the event loop. The engine comes to each between two steps, in order."""

    def __init__(self, engine: EngineLoop[DecodeCore], changed: Callable[[], None]) -> None:
        """`changed` is told when a command is done that may change the node's status."""
        self.num_asking = 0  # calls of `ask` under way
        self._engine = engine
        self._changed = changed

    async def ask(self, reservation_id: ReservationId, fn: Callable[[DecodeCore], T], check: Callable[[], None]) -> T:
        """The engine's answer, if `check` raises nothing then: a drain may have begun meanwhile.

        Where nobody waits any more, or the check fails, nothing of the reservation stays with the engine.
        """
        self.num_asking += 1
        try:
            answer = await self._engine.call(fn)
            check()
        except (asyncio.CancelledError, UnavailableError):
            self.give_back(reservation_id)
            raise
        finally:
            self.num_asking -= 1
        return answer

    def submit(self, fn: Callable[[DecodeCore], None], failed: Callable[[KVRelayError], None]) -> asyncio.Future[None]:
        """`failed` hears of an error, whoever waits for the future or not."""
        future = self._engine.submit(fn)

        def report(done: asyncio.Future[None]) -> None:
            error = None if done.cancelled() else done.exception()
            if error is not None:
                failed(error if isinstance(error, KVRelayError) else KVRelayError(f"the engine failed: {error}"))
            self._changed()

        future.add_done_callback(report)
        return future

    def give_back(self, reservation_id: ReservationId) -> None:
        """Has the engine free what a reservation that ended on this side still has there."""
        if self._engine.running:
            released = self._engine.submit(lambda core: core.release(reservation_id))
            released.add_done_callback(self._on_given_back)

    def _on_given_back(self, released: asyncio.Future[None]) -> None:
        error = None if released.cancelled() else released.exception()
        if error is not None and not isinstance(error, UnavailableError):
            logger.error("blocks of an ended reservation could not be freed", exc_info=error)
        self._changed()
