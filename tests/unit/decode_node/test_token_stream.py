"""Tokens on their way to the reader of an answer."""

from decode_node.streams import TokenStream
from kvrelay.errors import UnavailableError
from kvrelay.messages import DecodeFinished
from kvrelay.sampling import GeneratedToken, StepLogprobs, TokenLogprob
from kvrelay.types import FinishReason

FINISHED = DecodeFinished(FinishReason.LENGTH)
ALL = 1_000


def tokens(*ids: int) -> tuple[GeneratedToken, ...]:
    return tuple(GeneratedToken(i) for i in ids)


def test_a_slow_reader_gets_tokens_together_and_the_end_last() -> None:
    stream = TokenStream()
    stream.push(GeneratedToken(1))
    stream.push(GeneratedToken(2))
    stream.finish(FINISHED)
    assert stream.end is None
    assert stream.take(ALL) == tokens(1, 2)
    assert (stream.end, stream.has_tokens) == (FINISHED, False)


def test_a_reader_is_told_of_what_was_there_and_of_all_that_comes() -> None:
    stream, told = TokenStream(), list[int]()
    stream.push(GeneratedToken(1))
    stream.read_by(lambda: told.append(len(told)))
    assert told == [0]
    stream.push(GeneratedToken(2))
    stream.finish(FINISHED)
    assert told == [0, 1, 2]


def test_a_reader_is_not_told_of_nothing() -> None:
    told = list[int]()
    TokenStream().read_by(lambda: told.append(1))
    assert told == []


def test_a_failure_comes_after_the_tokens_before_it_and_the_first_end_counts() -> None:
    stream, gone = TokenStream(), UnavailableError("gone")
    stream.push(GeneratedToken(1))
    stream.fail(gone)
    stream.finish(FINISHED)
    assert stream.take(ALL) == tokens(1)
    assert stream.end is gone


def test_no_more_is_taken_than_was_asked_for_but_always_one() -> None:
    """A token with two top log-probabilities is four values: its id and three log-probabilities."""
    stream, one = TokenStream(), TokenLogprob(1, -0.5)
    wide = GeneratedToken(1, StepLogprobs(one, (one, one)))
    for token in (wide, wide, wide):
        stream.push(token)
    assert stream.take(8) == (wide, wide)
    assert stream.has_tokens
    assert stream.take(3) == (wide,)
    assert stream.take(3) == ()
