"""The tokens of one request on their way from the engine to its Decode call."""

from __future__ import annotations

import asyncio

from kvrelay.errors import KVRelayError
from kvrelay.messages import DecodeFinished, TokensDecoded
from kvrelay.sampling import GeneratedToken


class TokenStream:
    """Belongs to the event loop; one reader. Holds at most max_tokens tokens.

    A reader that is slow gets several tokens at a time; the engine never waits for it.
    """

    def __init__(self) -> None:
        self._tokens: list[GeneratedToken] = []
        self._end: DecodeFinished | KVRelayError | None = None
        self._news = asyncio.Event()

    def push(self, token: GeneratedToken) -> None:
        self._tokens.append(token)
        self._news.set()

    def finish(self, finished: DecodeFinished) -> None:
        self._close(finished)

    def fail(self, error: KVRelayError) -> None:
        self._close(error)

    async def next(self) -> TokensDecoded | DecodeFinished:
        """The tokens since the last call, then DecodeFinished; raises what the stream failed with."""
        while not self._tokens and self._end is None:
            self._news.clear()
            await self._news.wait()
        if self._tokens:
            tokens, self._tokens = tuple(self._tokens), []
            return TokensDecoded(tokens)
        if isinstance(self._end, DecodeFinished):
            return self._end
        assert self._end is not None
        raise self._end

    def _close(self, end: DecodeFinished | KVRelayError) -> None:
        if self._end is None:
            self._end = end
            self._news.set()
