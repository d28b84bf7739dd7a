"""Reads calls of tools out of an answer's text as it grows. Pure.

A call's arguments are told as they come, without waiting for their end. What turns out to be no call is text, whole.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Container, Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvrelay.tool_prompt import CALL_BEGIN, CALL_END, ToolFormat

# The usual beginning of a call; the arguments follow. Others are read when they are complete.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_BETWEEN = " \t\r\n,;]"  # of two calls, or after the last


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


class Reader(Protocol):
    """Of one answer."""

    def push(self, text: str) -> list[Piece]: ...

    def end(self) -> list[Piece]:
        """The answer is complete."""


MakeReader = Callable[[], Reader]


class PlainReader:
    """No tools: all is text."""

    def push(self, text: str) -> list[Piece]:
        return [Said(text)] if text else []

    def end(self) -> list[Piece]:
        return []


class ArgumentsReader:
    """The whole answer is the arguments of one tool, which the request named."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def push(self, text: str) -> list[Piece]:
        if not text:
            return []
        began: list[Piece] = [] if self._has_begun else [CallBegan(0, make_call_id(), self._name)]
        self._has_begun = True
        return [*began, ArgumentsGrew(0, text)]

    def end(self) -> list[Piece]:
        return []


class _Calls:
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


class _CallObject:
    """One JSON object with a name and arguments, as its text comes."""

    def __init__(self, calls: _Calls, between: str = "") -> None:
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
            head = _HEAD.match(self.unread)
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


class HermesReader:
    """Text, and calls between tags."""

    def __init__(self, most_calls: int | None = None) -> None:
        self._calls = _Calls(most_calls)
        self._held = ""  # text that may be the beginning of a tag, and blanks before it
        self._call: _CallObject | None = None

    def push(self, text: str) -> list[Piece]:
        return list(self._push(text))

    def _push(self, text: str) -> Iterator[Piece]:
        while text:
            if self._call is None:
                text = yield from self._say(text)
            else:
                text = yield from self._read_call(self._call, text)

    def end(self) -> list[Piece]:
        if self._call is None:
            is_text = self._held.strip() or not self._calls.num
            return [Said(self._held)] if self._held and is_text else []
        if self._call.has_name:
            return []
        return self._calls.whole(self._call.unread) or [Said(CALL_BEGIN + self._call.unread)]

    def _say(self, text: str) -> Generator[Piece, None, str]:
        """Gives back what follows the tag of a call."""
        pending = self._held + text
        before, tag, after = pending.partition(CALL_BEGIN)
        if tag:
            self._held, self._call = "", _CallObject(self._calls)
            if said := before.rstrip():
                yield Said(said)
            return after
        certain = pending[: len(pending) - _num_of_tag(pending)].rstrip()
        self._held = pending[len(certain) :]
        if certain:
            yield Said(certain)
        return ""

    def _read_call(self, call: _CallObject, text: str) -> Generator[Piece, None, str]:
        """Gives back what follows the call's end."""
        yield from call.push(text)
        before, tag, after = call.unread.partition(CALL_END)
        if not tag or (call.has_name and not call.is_complete):
            return ""
        self._call = None
        if not call.has_name:
            yield from self._calls.whole(before) or [Said(f"{CALL_BEGIN}{before}{CALL_END}")]
        return after


class JsonReader:
    """The whole answer is calls: objects one after the other, in an array or not. `names` are the tools' own: an object
    with another name is text."""

    def __init__(self, names: frozenset[str], most_calls: int | None = None) -> None:
        self._names = names
        self._calls = _Calls(most_calls)
        self._text = ""  # while it is not known to be calls
        self._call: _CallObject | None = None
        self._is_text = False

    def push(self, text: str) -> list[Piece]:
        if self._is_text:
            return [Said(text)] if text else []
        if self._call is None:
            self._text += text
            return self._begin()
        return list(self._read(self._call, text))

    def end(self) -> list[Piece]:
        if self._call is not None or self._is_text or not self._text:
            return []
        return self._calls.whole(self._text, self._names) or [Said(self._text)]

    def _begin(self) -> list[Piece]:
        written = self._text.lstrip()
        if written and written[0] not in "{[":
            self._is_text = True
            return [Said(self._text)]
        head = _HEAD.match(written.removeprefix("["))
        if head is None or head[1] not in self._names:
            return []
        self._call = _CallObject(self._calls)
        return list(self._read(self._call, written.removeprefix("[")))

    def _read(self, call: _CallObject, text: str) -> Iterator[Piece]:
        yield from call.push(text)
        while call.is_complete:
            text = call.unread
            self._call = call = _CallObject(self._calls, _BETWEEN)
            yield from call.push(text)


def make_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def reader_of(form: ToolFormat, names: frozenset[str], most_calls: int | None) -> Reader:
    return HermesReader(most_calls) if form is ToolFormat.HERMES else JsonReader(names, most_calls)


def _num_of_tag(text: str) -> int:
    """Characters at the end that may be the beginning of CALL_BEGIN."""
    return next((size for size in range(len(CALL_BEGIN) - 1, 0, -1) if text.endswith(CALL_BEGIN[:size])), 0)
