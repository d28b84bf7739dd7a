"""Answers that come mixed are written one after another, each as early as its turn allows."""

from __future__ import annotations

from kvrelay.answer_printer import AnswerPrinter
from kvrelay.inference import ChoiceFinished, RequestAccepted, TokensGenerated
from kvrelay.types import FinishReason, RequestId


def more(index: int, text: str) -> TokensGenerated:
    return TokensGenerated((), text, index)


def complete(index: int) -> ChoiceFinished:
    return ChoiceFinished(index, FinishReason.STOP, "", 1)


def test_one_answer_has_no_header() -> None:
    written: list[str] = []
    printer = AnswerPrinter(1, written.append)
    printer.add(RequestAccepted(RequestId("r"), 1, 7, 9))
    printer.add(more(0, "a"))
    printer.add(more(0, "b"))
    assert written == ["a", "b"]


def test_several_wait_for_their_turn() -> None:
    written: list[str] = []
    printer = AnswerPrinter(3, written.append)
    printer.add(RequestAccepted(RequestId("r"), 1, 7, 9))
    printer.add(more(0, "one"))
    printer.add(more(2, "thr"))
    printer.add(more(1, "tw"))
    assert "".join(written) == "--- 1 of 3 ---\none"
    printer.add(complete(2))
    printer.add(complete(0))
    assert "".join(written) == "--- 1 of 3 ---\none\n\n--- 2 of 3 ---\ntw"
    printer.add(more(1, "o"))  # it is its turn: as it comes
    assert written[-1] == "o"
    printer.add(complete(1))
    assert "".join(written) == "--- 1 of 3 ---\none\n\n--- 2 of 3 ---\ntwo\n\n--- 3 of 3 ---\nthr"


def test_an_error_after_text_gets_a_line_of_its_own() -> None:
    written: list[str] = []
    printer = AnswerPrinter(2, written.append)
    printer.break_line()
    assert written == []
    printer.add(more(0, "half"))
    printer.break_line()
    assert "".join(written) == "--- 1 of 2 ---\nhalf\n"
