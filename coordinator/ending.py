"""How the tasks of a request end, so that nothing of it outlives it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Any

from kvrelay.errors import KVRelayError

logger = logging.getLogger(__name__)


async def end_all(tasks: Collection[asyncio.Task[Any]], what: str) -> None:
    """Cancels what still runs and waits for it. `what` names the whole in the log, should a fault of ours end one.

    A cancel of the caller meanwhile, by a deadline say, does not cut that short, for a task may be waiting for a grant
    that is on its way, to give it back; it is raised once all have ended.
    """
    for task in tasks:
        task.cancel()
    cancelled = None
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        fault = None if task.cancelled() else task.exception()
        if fault is not None and not isinstance(fault, KVRelayError):
            logger.error("%s ended by a fault of ours", what, exc_info=fault)
    if cancelled is not None:
        raise cancelled
