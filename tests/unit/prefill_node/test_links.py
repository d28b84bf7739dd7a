"""Which connections to decode nodes are kept, and when they are closed."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.errors import StaleError, UnavailableError
from prefill_node.links import DecodeLinks


class FakeChannel:
    def __init__(self, address: str) -> None:
        self.address = address
        self.closed = False

    async def close(self) -> None:
        self.closed = True


class Opened:
    """Opens fake channels and remembers them."""

    def __init__(self) -> None:
        self.channels: list[FakeChannel] = []

    def __call__(self, address: str) -> Any:
        self.channels.append(FakeChannel(address))
        return self.channels[-1]

    @property
    def alive(self) -> list[str]:
        return [channel.address for channel in self.channels if not channel.closed]


async def test_handoffs_to_one_node_share_a_connection() -> None:
    opened = Opened()
    links = DecodeLinks(512, opened)
    async with links.use("a") as first, links.use("a") as second:
        assert first is second
    async with links.use("a") as third:
        assert third is first
    assert opened.alive == ["a"]
    await links.close()
    assert opened.alive == []


async def test_an_unavailable_node_is_connected_anew_once_its_last_user_left() -> None:
    opened = Opened()
    links = DecodeLinks(512, opened)
    async with links.use("a"):
        with pytest.raises(UnavailableError):
            async with links.use("a"):
                raise UnavailableError("gone")
        assert opened.alive == ["a"]
        async with links.use("a"):
            assert opened.alive == ["a", "a"]
    assert opened.alive == ["a"]
    assert opened.channels[0].closed
    await links.close()


async def test_a_links_pace_is_kept_between_handoffs_and_forgotten_with_the_link() -> None:
    links = DecodeLinks(512, Opened())
    async with links.use("a") as first:
        pace = first.turns.pace
        pace.answered(pace.sent(512, 0.0), 0.0)
        learnt = pace.bound_bytes
    async with links.use("a") as again:
        assert again.turns.pace.bound_bytes == learnt
    with pytest.raises(UnavailableError):
        async with links.use("a"):
            raise UnavailableError("gone")
    async with links.use("a") as anew:
        assert anew.turns.pace.bound_bytes == learnt // 2
    await links.close()


async def test_a_refusal_keeps_the_connection() -> None:
    opened = Opened()
    links = DecodeLinks(512, opened)
    with pytest.raises(StaleError):
        async with links.use("a"):
            raise StaleError("the reservation has ended")
    async with links.use("a"):
        assert len(opened.channels) == 1
    await links.close()


async def test_the_longest_unused_connection_goes_first() -> None:
    opened = Opened()
    links = DecodeLinks(512, opened, max_idle=2)
    for address in ("a", "b", "a", "c"):
        async with links.use(address):
            pass
    assert opened.alive == ["a", "c"]
    await links.close()
