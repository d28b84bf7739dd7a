"""Token ids in, text out, one token at a time and only what is certain."""

from __future__ import annotations

import codecs
from typing import Protocol


class TokenBytes(Protocol):
    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """The text of one answer as it grows.

    Holds back the bytes of an unfinished UTF-8 character and text that may turn out to be a stop string, so what
    was returned never has to be taken back. The parts together are the decode of all bytes at once (invalid bytes
    become U+FFFD), cut before the stop string that completes first; `stopped` names it, and nothing follows it.
    """

    def __init__(self, tokenizer: TokenBytes, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._undecoded = b""  # the start of a character so far
        self._matchers = [_StopMatcher(text) for text in stop]
        self._held = ""  # decoded, but the start of a stop string so far
        self.stopped: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """The text that became certain with this token.

        With `may_stop` False (tokens before `min_tokens`) its text is no part of any stop string.
        """
        text = self._decode(self._tokenizer.token_bytes(token_id), final=False)
        return self._advance(text, may_stop) if self._matchers else text

    def flush(self) -> str:
        """The rest, at the end of the answer: an unfinished character becomes one U+FFFD, held text is released."""
        rest = self._advance(self._decode(b"", final=True), may_stop=True)
        return rest + self._release()

    def _decode(self, more: bytes, *, final: bool) -> str:
        """As an incremental decoder of the standard library, without its layers: this runs for every token."""
        pending = self._undecoded + more
        text, num_decoded = codecs.utf_8_decode(pending, "replace", final)
        self._undecoded = pending[num_decoded:]
        return text

    def _advance(self, text: str, may_stop: bool) -> str:
        if self.stopped is not None:
            return ""
        if not self._matchers:
            return text
        if not may_stop:
            return self._release() + text
        return self._scan(text)

    def _scan(self, text: str) -> str:
        pending = self._held + text
        for end in range(len(self._held) + 1, len(pending) + 1):
            complete = [matcher for matcher in self._matchers if matcher.advance(pending[end - 1])]
            if complete:
                self.stopped = max((matcher.text for matcher in complete), key=len)
                self._held = ""
                return pending[: end - len(self.stopped)]
        num_held = max(matcher.num_matched for matcher in self._matchers)
        self._held = pending[len(pending) - num_held :]
        return pending[: len(pending) - num_held]

    def _release(self) -> str:
        released, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.num_matched = 0
        return released


class _StopMatcher:
    """How much of one stop string the text so far ends with (Knuth, Morris and Pratt: linear in the text)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallback = _borders(text)

    def advance(self, char: str) -> bool:
        """True when `char` completes the stop string."""
        while self.num_matched and self.text[self.num_matched] != char:
            self.num_matched = self._fallback[self.num_matched - 1]
        if self.text[self.num_matched] == char:
            self.num_matched += 1
        return self.num_matched == len(self.text)


def _borders(text: str) -> list[int]:
    """For each prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for end in range(1, len(text)):
        while length and text[length] != text[end]:
            length = borders[length - 1]
        length += text[length] == text[end]
        borders[end] = length
    return borders
