"""What one request uses and how fast it gets it, told to those who keep accounts of it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.slo import Targets

OnJudged = Callable[[str, bool], None]  # "ttft" or "itl", and whether it was within its target
OnSpent = Callable[[int], None]  # tokens
OnAnswer = Callable[[int, float], None]  # a complete answer's tokens, and seconds from its first to its last


@dataclass(slots=True)
class _Answer:
    first_at: float
    last_at: float
    num_tokens: int = 0


@dataclass(slots=True)
class Tally:
    """Of a request and all its answers. The prompt is paid for with the first token: what never came costs nothing."""

    targets: Targets
    num_prompt_tokens: int
    on_judged: OnJudged
    on_spent: OnSpent
    on_answer: OnAnswer
    _answers: dict[int, _Answer] = field(default_factory=dict)

    def tokens(self, index: int, num_tokens: int, since_accepted_s: float, now: float) -> None:
        """More of an answer left for the client."""
        if not self._answers:
            self.on_spent(self.num_prompt_tokens)
            self._judge("ttft", since_accepted_s, self.targets.ttft_s)
        answer = self._answers.get(index)
        if answer is None:
            answer = self._answers[index] = _Answer(now, now)
        answer.last_at = now
        answer.num_tokens += num_tokens
        self.on_spent(num_tokens)

    def answered(self, index: int) -> None:
        """An answer is complete."""
        answer = self._answers.get(index)
        if answer is None:
            return
        seconds = answer.last_at - answer.first_at
        self.on_answer(answer.num_tokens, seconds)
        if answer.num_tokens > 1:
            self._judge("itl", seconds / (answer.num_tokens - 1), self.targets.itl_s)

    def failed(self) -> None:
        """The request failed, and was not cancelled: what it was promised did not come."""
        if not self._answers:
            self._judge("ttft", float("inf"), self.targets.ttft_s)
        self._judge("itl", float("inf"), self.targets.itl_s)

    def _judge(self, target: str, actual_s: float, limit_s: float | None) -> None:
        if limit_s is not None:
            self.on_judged(target, actual_s <= limit_s)
