"""Reads calls of tools out of an answer's text as it grows. Pure.

What turns out to be no call is text, whole.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Protocol

from coordinator.http.call_object import (
    ArgumentsGrew,
    CallBegan,
    CallObject,
    Calls,
    Piece,
    Said,
    find_head,
    make_call_id,
)
from kvrelay.tool_prompt import CALL_BEGIN, CALL_END, ToolFormat

_BETWEEN = " \t\r\n,;]"  # of two calls, or after the last


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


class HermesReader:
    """Text, and calls between tags."""

    def __init__(self, most_calls: int | None = None) -> None:
        self._calls = Calls(most_calls)
        self._held = ""  # text that may be the beginning of a tag, and blanks before it
        self._call: CallObject | None = None

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
            self._held, self._call = "", CallObject(self._calls)
            if said := before.rstrip():
                yield Said(said)
            return after
        certain = pending[: len(pending) - _num_of_tag(pending)].rstrip()
        self._held = pending[len(certain) :]
        if certain:
            yield Said(certain)
        return ""

    def _read_call(self, call: CallObject, text: str) -> Generator[Piece, None, str]:
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
        self._calls = Calls(most_calls)
        self._text = ""  # while it is not known to be calls
        self._call: CallObject | None = None
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
        head = find_head(written.removeprefix("["))
        if head is None or head[1] not in self._names:
            return []
        self._call = CallObject(self._calls)
        return list(self._read(self._call, written.removeprefix("[")))

    def _read(self, call: CallObject, text: str) -> Iterator[Piece]:
        yield from call.push(text)
        while call.is_complete:
            text = call.unread
            self._call = call = CallObject(self._calls, _BETWEEN)
            yield from call.push(text)


def reader_of(form: ToolFormat, names: frozenset[str], most_calls: int | None) -> Reader:
    return HermesReader(most_calls) if form is ToolFormat.HERMES else JsonReader(names, most_calls)


def _num_of_tag(text: str) -> int:
    """Characters at the end that may be the beginning of CALL_BEGIN."""
    return next((size for size in range(len(CALL_BEGIN) - 1, 0, -1) if text.endswith(CALL_BEGIN[:size])), 0)
