"""Answers on a terminal: one after another, though they are computed side by side."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.client import AnswerEvent
from kvrelay.inference import ChoiceFinished, TokensGenerated


class AnswerPrinter:
    """Writes the first answer that is not complete as it grows; those after it wait for their turn.

    Several have a header each; one has none.
    """

    def __init__(self, n: int, write: Callable[[str], None]) -> None:
        self._n = n
        self._write = write
        self._unwritten = [""] * n
        self._complete: set[int] = set()
        self._turn = -1  # whose answer is being written; -1 before anything came
        self._in_line = False

    def add(self, event: AnswerEvent) -> None:
        match event:
            case TokensGenerated():
                self._unwritten[event.index] += event.text
            case ChoiceFinished():
                self._complete.add(event.index)
            case _:
                return
        if self._turn < 0:
            self._next()
        self._write_text()
        while self._turn in self._complete and self._turn + 1 < self._n:
            self._next()
            self._write_text()

    def break_line(self) -> None:
        """What comes next gets a line of its own."""
        if self._in_line:
            self._write("\n")
            self._in_line = False

    def _next(self) -> None:
        self._turn += 1
        if self._n > 1:
            before = "\n\n" if self._turn else ""
            self._write(f"{before}--- {self._turn + 1} of {self._n} ---\n")

    def _write_text(self) -> None:
        text, self._unwritten[self._turn] = self._unwritten[self._turn], ""
        if text:
            self._write(text)
            self._in_line = True
