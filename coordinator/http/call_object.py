"""One call of a tool in an answer's text, as it comes. Pure.

A call's arguments are told without waiting for their end.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Container, Iterator
from dataclasses import dataclass

# The usual beginning of a call; the arguments follow. Others are read when they are complete.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
MAX_HEAD_CHARS = 1_000  # so that a name without end is not looked through again with each token


@dataclass(frozen=True, slots=True)
class Said:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    """Call `index` of the answer."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsGrew:
    """More of the JSON text of call `index`'s arguments."""

    index: int
    text: str


Piece = Said | CallBegan | ArgumentsGrew


def find_head(text: str) -> re.Match[str] | None:
    """What stands before the arguments of a usual call that the text begins with; group 1 is the name."""
    return _HEAD.match(text, 0, MAX_HEAD_CHARS)


class Calls:
    """Numbers calls, up to `most`; what is beyond is not told."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self.num = 0

    def begin(self, name: str) -> list[Piece]:
        self.num += 1
        return [CallBegan(self.num - 1, make_call_id(), name)] if self._is_told else []

    def grow(self, text: str) -> list[Piece]:
        return [ArgumentsGrew(self.num - 1, text)] if text and self._is_told else []

    def whole(self, text: str, names: Container[str] | None = None) -> list[Piece] | None:
        """Of a JSON object that is no usual call; None where it is none at all, or has none of the names."""
        try:
            call = json.loads(text)
            json.dumps(call, ensure_ascii=False).encode()  # JSON can spell half a character, and no reply can hold it
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        if names is not None and call["name"] not in names:
            return None
        arguments = call.get("arguments", call.get("parameters"))
        written = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        return [*self.begin(call["name"]), *self.grow(written)]

    @property
    def _is_told(self) -> bool:
        return self._most is None or self.num <= self._most


class CallObject:
    """One JSON object with a name and arguments, as its text comes."""

    def __init__(self, calls: Calls, between: str = "") -> None:
        """`between` are characters that may stand before it."""
        self._calls = calls
        self._between = between
        self._scanner: _ObjectScanner | None = None
        self.unread = ""  # while the name is not known: all of it; when complete: what follows
        self.is_complete = False

    @property
    def has_name(self) -> bool:
        return self._scanner is not None

    def push(self, text: str) -> Iterator[Piece]:
        self.unread += text
        if self._scanner is None:
            self.unread = self.unread.lstrip(self._between) if self._between else self.unread
            head = find_head(self.unread)
            if head is None:
                return
            self._scanner = _ObjectScanner()
            self.unread = self.unread[head.end() :]
            yield from self._calls.begin(head[1])
        if not self._scanner.is_complete:
            num_chars = self._scanner.scan(self.unread)
            grown, self.unread = self.unread[:num_chars], self.unread[num_chars:]
            yield from self._calls.grow(grown)
        rest = self.unread.lstrip()
        if self._scanner.is_complete and rest.startswith("}"):
            self.is_complete, self.unread = True, rest[1:]


class _ObjectScanner:
    """Finds where a JSON object ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.is_complete = False

    def scan(self, text: str) -> int:
        """How many characters are the object's."""
        for index, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = char == "\\", char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self.is_complete = True
                    return index + 1
        return len(text)


def make_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
