"""An answer that is sent again goes on where it broke off, or is an error."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.delivered import AnswerEvent, Delivered
from kvrelay.errors import AnswerDiffersError
from kvrelay.inference import ChoiceFinished, RequestAccepted, RequestFinished, Timing, TokensGenerated, Usage
from kvrelay.sampling import GeneratedToken
from kvrelay.types import FinishReason, RequestId

ACCEPTED = RequestAccepted(RequestId("r"), 10, seed=7, max_tokens=9)
FINISHED = RequestFinished(FinishReason.STOP, Usage(10, 3), Timing())


def tokens(text: str, index: int = 0) -> TokensGenerated:
    return TokensGenerated(tuple(GeneratedToken(ord(char)) for char in text), text, index)


def taken(delivered: Delivered, *events: AnswerEvent) -> list[AnswerEvent | None]:
    return [delivered.take(event) for event in events]


def test_a_first_sending_passes_as_it_is() -> None:
    events = (
        ACCEPTED,
        tokens("ab"),
        tokens("x", 1),
        TokensGenerated((), "!"),
        ChoiceFinished(1, FinishReason.STOP, "", 1),
    )
    assert taken(Delivered(), *events, FINISHED) == [*events, FINISHED]


def test_a_second_sending_gives_what_is_new() -> None:
    delivered = Delivered()
    taken(delivered, ACCEPTED, tokens("ab"), tokens("c"))
    delivered.begin_again()
    assert taken(delivered, ACCEPTED, tokens("a"), tokens("bcd"), tokens("e"), FINISHED) == [
        None,
        None,
        tokens("d"),
        tokens("e"),
        FINISHED,
    ]


def test_text_that_lags_behind_its_tokens_is_given_once() -> None:
    delivered = Delivered()
    taken(delivered, ACCEPTED, TokensGenerated((GeneratedToken(1),), "a"), TokensGenerated((GeneratedToken(2),), ""))
    delivered.begin_again()
    again = TokensGenerated((GeneratedToken(1), GeneratedToken(2)), "a")
    assert taken(delivered, ACCEPTED, again, TokensGenerated((GeneratedToken(3),), "bc"), FINISHED) == [
        None,
        None,
        TokensGenerated((GeneratedToken(3),), "bc"),
        FINISHED,
    ]


def test_each_of_several_answers_ends_once() -> None:
    delivered, ended = Delivered(), ChoiceFinished(1, FinishReason.STOP, "", 1)
    taken(delivered, ACCEPTED, tokens("x", 1), ended, tokens("a"))
    delivered.begin_again()
    assert taken(delivered, tokens("abc"), tokens("x", 1), ended, ChoiceFinished(0, FinishReason.STOP, "", 3)) == [
        tokens("bc"),
        None,
        None,
        ChoiceFinished(0, FinishReason.STOP, "", 3),
    ]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (tokens("aXc"), "token 1 of answer 0 is 88 and was 98"),
        (replace(ACCEPTED, seed=8), "has 10 prompt tokens and the seed 8; it had 10 and 7"),
        (replace(ACCEPTED, prompt_tokens=11), "has 11 prompt tokens and the seed 7; it had 10 and 7"),
        (FINISHED, "answer 0 has 0 tokens and had 2 so far"),
        (ChoiceFinished(0, FinishReason.STOP, "", 1), "answer 0 has 0 tokens and had 2 so far"),
    ],
)
def test_another_answer_is_an_error(event: AnswerEvent, message: str) -> None:
    delivered = Delivered()
    taken(delivered, ACCEPTED, tokens("ab"))
    delivered.begin_again()
    with pytest.raises(AnswerDiffersError, match=message):
        delivered.take(event)


@given(st.text("abc", min_size=1, max_size=30), st.lists(st.lists(st.integers(1, 5), max_size=12), max_size=6))
def test_however_often_it_breaks_off_the_caller_gets_the_answer_once(answer: str, sendings: list[list[int]]) -> None:
    """Each sending is cut into pieces of such lengths and breaks off after them; the last one is whole."""
    delivered, got = Delivered(), ""
    for lengths in [*sendings, [len(answer)]]:
        delivered.begin_again()
        at = 0
        for length in lengths:
            event = delivered.take(tokens(answer[at : at + length]))
            at += length
            if isinstance(event, TokensGenerated):
                assert "".join(chr(token.token_id) for token in event.tokens) == event.text
                got += event.text
        assert answer.startswith(got)
    assert got == answer
    assert delivered.take(FINISHED) == FINISHED
