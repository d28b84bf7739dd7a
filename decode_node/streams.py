"""The tokens of one request on their way from the engine to whoever reads its answer. Pure."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.errors import KVRelayError
from kvrelay.messages import DecodeFinished
from kvrelay.sampling import GeneratedToken


class TokenStream:
    """Belongs to the event loop; one reader. Holds at most max_tokens tokens.

    A reader that is slow gets several tokens at a time; the engine never waits for it.
    """

    def __init__(self) -> None:
        self._tokens: list[GeneratedToken] = []
        self._end: DecodeFinished | KVRelayError | None = None
        self._on_news: Callable[[], None] | None = None

    def read_by(self, on_news: Callable[[], None]) -> None:
        """The reader from now on: `on_news` is called for whatever comes, and now if there is anything."""
        self._on_news = on_news
        if self._tokens or self._end is not None:
            on_news()

    def push(self, token: GeneratedToken) -> None:
        self._tokens.append(token)
        self._tell()

    def finish(self, finished: DecodeFinished) -> None:
        self._close(finished)

    def fail(self, error: KVRelayError) -> None:
        self._close(error)

    def take(self, max_values: int) -> tuple[GeneratedToken, ...]:
        """The next tokens, each once: at least one if there is any, and no more than have `max_values` token ids and
        log-probabilities."""
        num_taken = 0
        for token in self._tokens:
            max_values -= num_values(token)
            if max_values < 0 and num_taken:
                break
            num_taken += 1
        taken, self._tokens = tuple(self._tokens[:num_taken]), self._tokens[num_taken:]
        return taken

    @property
    def end(self) -> DecodeFinished | KVRelayError | None:
        """Once all tokens are taken, what it ended with."""
        return None if self._tokens else self._end

    @property
    def has_tokens(self) -> bool:
        return bool(self._tokens)

    def _close(self, end: DecodeFinished | KVRelayError) -> None:
        if self._end is None:
            self._end = end
            self._tell()

    def _tell(self) -> None:
        if self._on_news is not None:
            self._on_news()


def num_values(token: GeneratedToken) -> int:
    """Token ids and log-probabilities that say what a token is."""
    return 1 if token.logprobs is None else 2 + len(token.logprobs.top)
