"""Tasks of a request are over before it goes on, however often it is cancelled meanwhile."""

from __future__ import annotations

import asyncio
import logging

import pytest

from coordinator.ending import end_all
from kvrelay.errors import KVRelayError, UnavailableError


class Slow:
    """A task that, once cancelled, does not end before it may."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ending = asyncio.Event()
        self.may_end = asyncio.Event()
        self._error = error
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.ending.set()
            await self.may_end.wait()
            if self._error is not None:
                raise self._error


async def fail_and_end(slow: Slow) -> None:
    try:
        raise UnavailableError("the node is gone")
    finally:
        await end_all([slow.task], "an attempt")


async def test_a_cancel_while_tasks_end_waits_for_them_and_is_not_lost() -> None:
    slow = Slow()
    await asyncio.sleep(0)
    ending = asyncio.create_task(fail_and_end(slow))
    async with asyncio.timeout(10):
        await slow.ending.wait()
        for _ in range(2):
            ending.cancel()
            await asyncio.sleep(0)
        assert not ending.done()
        slow.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await ending
    assert slow.task.done()


@pytest.mark.parametrize(
    ("error", "lines"), [(UnavailableError("gone"), []), (ValueError(), ["an attempt ended by a fault of ours"])]
)
async def test_only_a_fault_of_ours_is_logged(
    error: Exception, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    slow = Slow(error)
    await asyncio.sleep(0)
    slow.may_end.set()
    await end_all([slow.task], "an attempt")
    assert isinstance(error, KVRelayError) == (not lines)
    assert [record.message for record in caplog.records if record.name == "coordinator.ending"] == lines
