"""What counts as a right answer, and what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.inference import RequestFinished, Timing, Usage
from kvrelay.sampling import GeneratedToken, SamplingParams, StepLogprobs, TokenLogprob
from kvrelay.types import CachedTokens, FinishReason
from tests.chaos.asks import Shape
from tests.chaos.expected import Expected, ExpectedChoice, cut_at_stop, pick_stop
from tests.chaos.judge import ReceivedChoice, judge_beginning, judge_whole

GREEDY = SamplingParams(temperature=0.0, seed=1, max_tokens=4, ignore_eos=True)
EXPECTED = Expected(
    Shape(0, (1, 2, 3), GREEDY), GREEDY, (ExpectedChoice((104, 111, 117, 115), "hous", FinishReason.LENGTH),)
)
FINISHED = RequestFinished(FinishReason.LENGTH, Usage(3, 4), Timing())


def letter(token_id: int) -> bytes:
    return bytes([token_id])


def tokens(text: str) -> list[GeneratedToken]:
    return [GeneratedToken(ord(character)) for character in text]


def received(text: str, reason: FinishReason | None = FinishReason.LENGTH, stop: str = "") -> list[ReceivedChoice]:
    return [ReceivedChoice(tokens(text), text, reason, stop)]


def test_the_expected_answer_is_right() -> None:
    assert judge_whole(EXPECTED, received("hous"), FINISHED) == []


@pytest.mark.parametrize(
    "got",
    [
        received("hour"),
        received("hou"),
        received("house"),
        received("houus"),
        received("hous", FinishReason.STOP),
        received("hous", FinishReason.LENGTH, "s"),
        [ReceivedChoice(tokens("hous"), "hoos", FinishReason.LENGTH)],
        [ReceivedChoice(tokens("hous"), "hou", FinishReason.LENGTH)],
        received("hous") * 2,
        [],
    ],
)
def test_a_lost_repeated_changed_or_added_token_is_wrong(got: list[ReceivedChoice]) -> None:
    assert judge_whole(EXPECTED, got[:1], FINISHED) if len(got) == 1 else judge_beginning(EXPECTED, got)


@pytest.mark.parametrize("usage", [Usage(3, 5), Usage(4, 4), Usage(3, 4, CachedTokens(device=4))])
def test_a_wrong_account_is_wrong(usage: Usage) -> None:
    assert judge_whole(EXPECTED, received("hous"), replace(FINISHED, usage=usage))


def test_the_beginning_of_the_answer_is_right_when_it_ended_early() -> None:
    for length in range(5):
        assert judge_beginning(EXPECTED, received("hous"[:length], None)) == []
    assert judge_beginning(EXPECTED, received("hoss", None))


def test_text_may_lag_behind_the_tokens_until_the_end() -> None:
    lagging = [ReceivedChoice(tokens("hous"), "hou")]
    assert judge_beginning(EXPECTED, lagging) == []


@pytest.mark.parametrize(
    ("logprob", "token_id", "is_right"), [(-1.0004, 104, True), (-1.1, 104, False), (-1.0, 105, False)]
)
def test_logprobs_are_compared_within_a_tolerance(logprob: float, token_id: int, is_right: bool) -> None:
    choice = ExpectedChoice((104,), "h", FinishReason.LENGTH, logprobs=(-1.0,))
    expected = Expected(EXPECTED.shape, GREEDY, (choice,))
    token = GeneratedToken(104, StepLogprobs(TokenLogprob(token_id, logprob), ()))
    assert (judge_beginning(expected, [ReceivedChoice([token], "h")]) == []) is is_right


def test_missing_logprobs_are_wrong() -> None:
    choice = ExpectedChoice((104,), "h", FinishReason.LENGTH, logprobs=(-1.0,))
    assert judge_beginning(Expected(EXPECTED.shape, GREEDY, (choice,)), received("h"))


def test_an_answer_ends_with_the_token_that_completes_its_stop_string() -> None:
    sampling = replace(GREEDY, stop=("us",))
    cut = cut_at_stop(tokens("houseus"), sampling, (), letter)
    assert cut == ExpectedChoice(tuple(map(ord, "hous")), "ho", FinishReason.STOP, "us")


def test_an_answer_without_its_stop_string_ends_at_its_length() -> None:
    sampling = replace(GREEDY, stop=("zz",))
    assert cut_at_stop(tokens("hous"), sampling, (), letter) == EXPECTED.choices[0]


def test_an_answer_may_end_with_the_end_of_sequence() -> None:
    cut = cut_at_stop([*tokens("ho"), GeneratedToken(0)], GREEDY, (0,), lambda i: letter(i) if i else b"")
    assert cut == ExpectedChoice((104, 111, 0), "ho", FinishReason.STOP)


def test_a_stop_string_is_picked_where_the_text_has_it_first() -> None:
    assert pick_stop(list(b"ababcd"), letter) == "bc"
    assert pick_stop(list(b"\xff\xff\xff\xff"), letter) not in "\ufffd" * 4
