"""Events of answers, as a request's task gives them and its client reads them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from kvrelay.inference import ChoiceFinished, GenerateEvent, RequestAccepted, TokensGenerated
from kvrelay.sampling import GeneratedToken
from kvrelay.types import FinishReason, RequestId

ACCEPTED = RequestAccepted(RequestId("r"), 1, 7, 9)


class Readable(Protocol):
    def events(self) -> AsyncIterator[GenerateEvent]: ...


def tokens(index: int, *token_ids: int) -> TokensGenerated:
    """Each token's text is the character of its number."""
    return TokensGenerated(
        tuple(GeneratedToken(token_id) for token_id in token_ids), "".join(map(chr, token_ids)), index
    )


def complete(index: int) -> ChoiceFinished:
    return ChoiceFinished(index, FinishReason.STOP, "", 1)


async def drained(source: Readable) -> list[GenerateEvent]:
    return [event async for event in source.events()]
