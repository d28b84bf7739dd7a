"""One stream's tokens, each to its own answer."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.errors import KVRelayError, NotFoundError, UnavailableError
from kvrelay.messages import AnswersAdvanced, AnswersAsked, AnswerWanted, DecodeFinished
from kvrelay.rpc.demultiplexer import Demultiplexer
from kvrelay.sampling import GeneratedToken
from kvrelay.types import AnswerHandle, FinishReason, ReservationId

FINISHED = DecodeFinished(FinishReason.LENGTH)


class Heard:
    """Notes what it hears."""

    def __init__(self, on_take: Callable[[], None] = lambda: None) -> None:
        self.token_ids: list[int] = []
        self.ends: list[DecodeFinished | KVRelayError] = []
        self._on_take = on_take

    def take(self, tokens: tuple[GeneratedToken, ...]) -> None:
        self.token_ids += [token.token_id for token in tokens]
        self._on_take()

    def end(self, end: DecodeFinished | KVRelayError) -> None:
        self.ends.append(end)


def begin(answers: Demultiplexer, reader: Heard, name: str, timeout_s: float = 0.0) -> AnswerHandle:
    return answers.begin(reader, ReservationId(name), compute_tail=False, timeout_s=timeout_s)


def step(*pairs: tuple[AnswerHandle, int]) -> AnswersAdvanced:
    return AnswersAdvanced(tuple((handle, (GeneratedToken(token_id),)) for handle, token_id in pairs))


def ended(handle: AnswerHandle, end: DecodeFinished | KVRelayError) -> AnswersAdvanced:
    return AnswersAdvanced(ended=((handle, end),))


def test_each_answer_gets_its_own() -> None:
    answers, first, second = Demultiplexer(), Heard(), Heard()
    one, two = begin(answers, first, "r1"), begin(answers, second, "r2")

    answers.advance(step((one, 10), (two, 20)))
    answers.advance(step((two, 21), (one, 11)))

    assert (first.token_ids, second.token_ids) == ([10, 11], [20, 21])
    assert first.ends == second.ends == []


def test_tokens_come_before_the_end_of_the_same_message() -> None:
    answers, reader = Demultiplexer(), Heard()
    handle = begin(answers, reader, "r1")
    seen: list[int] = []
    reader.end = lambda end: seen.extend(reader.token_ids)  # type: ignore[method-assign]

    answers.advance(AnswersAdvanced(((handle, (GeneratedToken(10),)),), ((handle, FINISHED),)))

    assert seen == [10]
    assert len(answers) == 0


def test_the_end_of_one_answer_leaves_the_others() -> None:
    answers, first, second = Demultiplexer(), Heard(), Heard()
    one, two = begin(answers, first, "r1"), begin(answers, second, "r2")
    gone = NotFoundError("lapsed")

    answers.advance(ended(one, gone))
    answers.advance(step((one, 10), (two, 20)))

    assert (first.token_ids, first.ends) == ([], [gone])
    assert (second.token_ids, second.ends) == ([20], [])


def test_what_is_asked_for_is_told_once() -> None:
    answers = Demultiplexer()
    one, two = begin(answers, Heard(), "r1", 50.0), begin(answers, Heard(), "r2")
    assert answers.to_ask() == AnswersAsked(
        (AnswerWanted(one, ReservationId("r1"), False, 50.0), AnswerWanted(two, ReservationId("r2"), False, 0.0))
    )
    assert answers.to_ask() is None

    answers.leave(one)
    answers.leave(one)
    assert answers.to_ask() == AnswersAsked(left=(one,))
    assert answers.to_ask() is None


def test_an_answer_that_is_left_hears_no_more_and_one_that_has_ended_is_not_left() -> None:
    answers, left, over = Demultiplexer(), Heard(), Heard()
    one, two = begin(answers, left, "r1"), begin(answers, over, "r2")
    answers.to_ask()
    answers.advance(ended(two, FINISHED))

    answers.leave(one)
    answers.leave(two)
    answers.advance(step((one, 10)))
    answers.advance(ended(one, FINISHED))

    assert (left.token_ids, left.ends) == ([], [])
    assert answers.to_ask() == AnswersAsked(left=(one,))


def test_an_answer_that_is_left_at_once_is_asked_for_too() -> None:
    """What asked for it holds a reservation, which its end frees."""
    answers = Demultiplexer()
    handle = begin(answers, Heard(), "r1")
    answers.leave(handle)

    asked = answers.to_ask()

    assert asked is not None
    assert ([one.handle for one in asked.wanted], asked.left) == ([handle], (handle,))


def test_handles_are_not_used_again() -> None:
    answers = Demultiplexer()
    handles = [begin(answers, Heard(), "r1") for _ in range(2)]
    for handle in handles:
        answers.leave(handle)

    assert begin(answers, Heard(), "r1") not in handles


def test_a_broken_stream_ends_every_open_answer_with_an_error_of_its_own() -> None:
    answers, first, second, over = Demultiplexer(), Heard(), Heard(), Heard()
    begin(answers, first, "r1")
    begin(answers, second, "r2")
    answers.advance(ended(begin(answers, over, "r3"), FINISHED))

    answers.fail(lambda: UnavailableError("gone"))
    answers.fail(lambda: UnavailableError("gone again"))

    assert [str(end) for end in (*first.ends, *second.ends)] == ["gone", "gone"]
    assert first.ends[0] is not second.ends[0]
    assert over.ends == [FINISHED]
    assert answers.to_ask() is None


def test_a_reader_may_leave_and_begin_while_it_is_given_tokens() -> None:
    answers = Demultiplexer()
    begun = Heard()

    def leave_all() -> None:
        answers.leave(one)
        answers.leave(two)
        begin(answers, begun, "r3")

    first, second = Heard(leave_all), Heard()
    one, two = begin(answers, first, "r1"), begin(answers, second, "r2")

    answers.advance(step((one, 10), (two, 20)))

    assert (first.token_ids, second.token_ids) == ([10], [])
    assert len(answers) == 1
