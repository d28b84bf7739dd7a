"""Waits for nodes of a role end when there are none for too long."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.presence import Presence
from kvrelay.errors import UnavailableError
from kvrelay.types import Role

BOTH = (Role.PREFILL_NODE, Role.DECODE_NODE)
FOREVER_S = 3600.0


async def wait(presence: Presence, roles: tuple[Role, ...], patience_s: float) -> None:
    async with presence.needed(roles, patience_s):
        await asyncio.Event().wait()


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_every_wait_ends_soon_after_the_last_node_of_a_role_went() -> None:
    presence = Presence()
    for role in BOTH:
        presence.update(role, True, now())
    waits = [asyncio.create_task(wait(presence, BOTH, 0.05)) for _ in range(3)]
    other = asyncio.create_task(wait(presence, (Role.PREFILL_NODE,), 0.05))
    await asyncio.sleep(0)
    presence.update(Role.DECODE_NODE, False, now())
    async with asyncio.timeout(10):
        for one in waits:
            with pytest.raises(UnavailableError, match="gone or not ready"):
                await one
    assert not other.done()
    other.cancel()
    await asyncio.wait([other])


async def test_one_that_comes_back_in_time_ends_no_wait() -> None:
    presence = Presence()
    presence.update(Role.DECODE_NODE, False, now())
    short, long = (asyncio.create_task(wait(presence, BOTH, patience_s)) for patience_s in (0.05, FOREVER_S))
    async with asyncio.timeout(10):
        with pytest.raises(UnavailableError):
            await short
    presence.update(Role.DECODE_NODE, True, now())
    presence.update(Role.DECODE_NODE, False, now())
    assert not long.done()
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long


async def test_patience_begins_with_the_wait() -> None:
    presence = Presence()
    presence.update(Role.DECODE_NODE, False, now() - FOREVER_S)
    async with presence.needed(BOTH, 5.0):
        await asyncio.sleep(0)  # room to look once


async def test_a_deadline_of_ones_own_stays_one() -> None:
    with pytest.raises(TimeoutError):
        async with Presence().needed(BOTH, FOREVER_S), asyncio.timeout(0):
            await asyncio.Event().wait()


async def test_news_of_a_role_may_come_while_a_wait_is_being_ended() -> None:
    """Its time is over, and its task has not run again yet."""
    presence = Presence()
    presence.update(Role.DECODE_NODE, False, now())
    ending = asyncio.Event()

    async def wait_and_linger() -> None:
        async with presence.needed(BOTH, 0.0):
            try:
                await asyncio.Event().wait()
            finally:
                ending.set()
                await asyncio.sleep(0)

    waiting = asyncio.create_task(wait_and_linger())
    async with asyncio.timeout(10):
        await ending.wait()
    presence.update(Role.DECODE_NODE, True, now())
    with pytest.raises(UnavailableError):
        await waiting
