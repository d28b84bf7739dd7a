"""What a request uses and how fast it gets it."""

from __future__ import annotations

from coordinator.slo import NO_TARGETS, Targets
from coordinator.tally import Tally


class Heard:
    def __init__(self, targets: Targets, num_prompt_tokens: int = 100) -> None:
        self.judged: list[tuple[str, bool]] = []
        self.spent: list[int] = []
        self.answers: list[tuple[int, float]] = []
        self.tally = Tally(
            targets,
            num_prompt_tokens,
            lambda target, attained: self.judged.append((target, attained)),
            self.spent.append,
            lambda num_tokens, seconds: self.answers.append((num_tokens, seconds)),
        )

    def answer(self, *moments: float, index: int = 0, accepted_at: float = 0.0) -> None:
        """A token at each of these."""
        for now in moments:
            self.tally.tokens(index, 1, now - accepted_at, now)
        self.tally.answered(index)


def test_within_both_targets_and_just_beyond_each() -> None:
    targets = Targets(ttft_s=1.0, itl_s=0.5)
    for moments, expected in (
        ((1.0, 1.25, 2.0), [("ttft", True), ("itl", True)]),
        ((1.5, 1.75, 2.0), [("ttft", False), ("itl", True)]),
        ((0.5, 0.75, 1.75), [("ttft", True), ("itl", False)]),
    ):
        heard = Heard(targets)
        heard.answer(*moments)
        assert heard.judged == expected


def test_what_has_no_target_is_not_judged() -> None:
    heard = Heard(NO_TARGETS)
    heard.answer(9.0, 99.0)
    heard.tally.failed()
    assert heard.judged == []


def test_each_answer_has_its_own_pace_and_the_first_token_is_the_requests() -> None:
    heard = Heard(Targets(ttft_s=1.0, itl_s=0.5))
    heard.answer(0.5, 0.75)
    heard.answer(2.0, 3.0, index=1)
    heard.answer(2.0, index=2)  # one token has nothing between
    assert heard.judged == [("ttft", True), ("itl", True), ("itl", False)]
    assert heard.answers == [(2, 0.25), (2, 1.0), (1, 0.0)]


def test_the_prompt_is_paid_once_with_the_first_token_and_each_token_as_it_comes() -> None:
    heard = Heard(NO_TARGETS, num_prompt_tokens=100)
    assert heard.spent == []
    heard.tally.tokens(0, 3, 1.0, 1.0)
    heard.tally.tokens(1, 2, 1.0, 1.0)
    heard.tally.tokens(0, 1, 1.0, 1.0)
    assert heard.spent == [100, 3, 2, 1]


def test_a_request_that_failed_missed_what_it_was_promised() -> None:
    heard = Heard(Targets(ttft_s=1.0, itl_s=0.5))
    heard.tally.failed()
    assert heard.judged == [("ttft", False), ("itl", False)]
    heard = Heard(Targets(ttft_s=1.0, itl_s=0.5))
    heard.tally.tokens(0, 1, 0.5, 0.5)
    heard.tally.failed()
    assert heard.judged == [("ttft", True), ("itl", False)]
    assert heard.answers == [], "it says nothing of how long answers get"
