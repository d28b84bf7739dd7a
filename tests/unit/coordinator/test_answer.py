"""An answer's tokens, text and end."""

from __future__ import annotations

import pytest

from coordinator.answer import Answer
from kvrelay.errors import KVRelayError
from kvrelay.inference import TokensGenerated
from kvrelay.sampling import GeneratedToken, SamplingParams
from kvrelay.types import FinishReason

EOS = 0


class Letters:
    """Token n is the n-th letter; 0 is the end and 27 to 29 are the bytes of a character of three."""

    def token_bytes(self, token_id: int) -> bytes:
        if token_id >= 27:
            return "€".encode()[token_id - 27 : token_id - 26]
        return bytes([96 + token_id]) if token_id else b""


def answer(**sampling: object) -> Answer:
    return Answer(Letters(), SamplingParams(**{"max_tokens": 10, **sampling}), (EOS,))  # type: ignore[arg-type]


def tokens(text: str) -> list[GeneratedToken]:
    return [GeneratedToken(ord(char) - 96) for char in text]


def test_text_and_tokens_grow_until_the_end_of_sequence() -> None:
    growing = answer()
    assert growing.add(tokens("ab")) == TokensGenerated(tuple(tokens("ab")), "ab")
    assert growing.reason is None
    assert growing.add([*tokens("c"), GeneratedToken(EOS)]).text == "c"
    assert growing.reason is FinishReason.STOP
    assert growing.token_ids == [1, 2, 3, EOS]
    assert growing.num_left == 6


def test_token_limit() -> None:
    growing = answer(max_tokens=2)
    growing.add(tokens("ab"))
    assert growing.reason is FinishReason.LENGTH
    with pytest.raises(KVRelayError, match="went on after token 2"):
        growing.add(tokens("c"))


def test_end_of_sequence_can_be_ignored() -> None:
    growing = answer(ignore_eos=True)
    growing.add([GeneratedToken(EOS)])
    assert growing.reason is None


def test_stop_token_is_counted_and_not_shown() -> None:
    growing = answer(stop_token_ids=(3,), ignore_eos=True)
    assert growing.add(tokens("abc")) == TokensGenerated(tuple(tokens("abc")), "ab")
    assert growing.reason is FinishReason.STOP
    assert growing.stop_string == ""


def test_stop_string_over_tokens_and_nothing_after_it_counts() -> None:
    growing = answer(stop=("cd",))
    assert growing.add(tokens("bc")).text == "b"
    assert growing.add(tokens("def")) == TokensGenerated(tuple(tokens("d")), "")
    assert growing.reason is FinishReason.STOP
    assert growing.stop_string == "cd"
    assert growing.token_ids == [2, 3, 4]
    assert growing.add(tokens("g")) == TokensGenerated((), "")  # the node was ahead


def test_stop_string_before_min_tokens_is_text() -> None:
    growing = answer(stop=("a",), min_tokens=3)
    assert growing.add(tokens("aaa")).text == "aa"
    assert growing.stop_string == "a"


def test_held_back_text_comes_at_the_end() -> None:
    growing = answer(stop=("bcd",), max_tokens=3)
    assert growing.add(tokens("ab")).text == "a"
    assert growing.add(tokens("c")).text == "bc"
    unfinished = answer()
    assert unfinished.add([GeneratedToken(27), GeneratedToken(28)]).text == ""
    assert unfinished.end(FinishReason.LENGTH) == TokensGenerated((), "�")
    assert unfinished.reason is FinishReason.LENGTH


def test_end_that_is_known_already_changes_nothing() -> None:
    growing = answer(max_tokens=1)
    growing.add(tokens("a"))
    assert growing.end(FinishReason.STOP) == TokensGenerated((), "")
    assert growing.reason is FinishReason.LENGTH


def test_its_events_say_which_of_several_answers_it_is() -> None:
    growing = Answer(Letters(), SamplingParams(max_tokens=10), (EOS,), index=2)
    assert growing.add(tokens("a")) == TokensGenerated(tuple(tokens("a")), "a", 2)
    assert growing.end(FinishReason.STOP).index == 2
