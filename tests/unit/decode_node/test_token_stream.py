"""Tokens on their way to a Decode call."""

import asyncio

import pytest

from decode_node.streams import TokenStream
from kvrelay.errors import UnavailableError
from kvrelay.messages import DecodeFinished, TokensDecoded
from kvrelay.sampling import GeneratedToken
from kvrelay.types import FinishReason

FINISHED = DecodeFinished(FinishReason.LENGTH)


def tokens(*ids: int) -> TokensDecoded:
    return TokensDecoded(tuple(GeneratedToken(i) for i in ids))


async def test_a_slow_reader_gets_tokens_together_and_the_end_last() -> None:
    stream = TokenStream()
    stream.push(GeneratedToken(1))
    stream.push(GeneratedToken(2))
    stream.finish(FINISHED)
    assert await stream.next() == tokens(1, 2)
    assert await stream.next() == FINISHED


async def test_a_waiting_reader_is_woken_for_each_step() -> None:
    stream = TokenStream()
    for token_id in (1, 2):
        reading = asyncio.ensure_future(stream.next())
        await asyncio.sleep(0)
        assert not reading.done()
        stream.push(GeneratedToken(token_id))
        assert await reading == tokens(token_id)


async def test_a_failure_comes_after_the_tokens_before_it_and_the_first_end_counts() -> None:
    stream = TokenStream()
    stream.push(GeneratedToken(1))
    stream.fail(UnavailableError("gone"))
    stream.finish(FINISHED)
    assert await stream.next() == tokens(1)
    with pytest.raises(UnavailableError, match="gone"):
        await stream.next()
