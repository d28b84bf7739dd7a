"""Whether what a client got is right: the whole answer, or the beginning of it where it ended early. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.inference import RequestFinished
from kvrelay.sampling import GeneratedToken
from kvrelay.types import FinishReason
from tests.chaos.expected import Expected, ExpectedChoice

LOGPROB_TOLERANCE = 1e-3


@dataclass(slots=True)
class ReceivedChoice:
    tokens: list[GeneratedToken] = field(default_factory=list)
    text: str = ""
    reason: FinishReason | None = None
    stop_string: str = ""


def judge_whole(expected: Expected, choices: Sequence[ReceivedChoice], finished: RequestFinished) -> list[str]:
    """What is wrong with a complete answer; nothing if it is right."""
    wrong = judge_beginning(expected, choices)
    for index, (want, got) in enumerate(zip(expected.choices, choices, strict=True)):
        ending = (len(got.tokens), got.text, got.reason, got.stop_string)
        if ending != (len(want.token_ids), want.text, want.reason, want.stop_string):
            wanted = (len(want.token_ids), want.text, want.reason, want.stop_string)
            wrong.append(f"choice {index}: (tokens, text, reason, stop string) are {ending}, not {wanted}")
    usage = finished.usage
    num_prompt, num_completion = len(expected.shape.prompt_ids), sum(len(one.token_ids) for one in expected.choices)
    if (usage.prompt_tokens, usage.completion_tokens) != (num_prompt, num_completion):
        wrong.append(f"usage is {usage}, not {num_prompt} prompt and {num_completion} completion tokens")
    if usage.cached.total > num_prompt:
        wrong.append(f"{usage.cached} are more cached tokens than the prompt's {num_prompt}")
    return wrong


def judge_beginning(expected: Expected, choices: Sequence[ReceivedChoice]) -> list[str]:
    """What is wrong with as much of an answer as came."""
    if len(choices) != len(expected.choices):
        return [f"{len(choices)} choices came, not {len(expected.choices)}"]
    return [
        f"choice {index}: {problem}"
        for index, (want, got) in enumerate(zip(expected.choices, choices, strict=True))
        for problem in _judge_choice(want, got)
    ]


def _judge_choice(want: ExpectedChoice, got: ReceivedChoice) -> list[str]:
    wrong = []
    token_ids = [token.token_id for token in got.tokens]
    for at, (mine, right) in enumerate(zip(token_ids, want.token_ids, strict=False)):
        if mine != right:
            around = slice(max(0, at - 3), at + 5)
            wrong.append(f"token {at} is {mine}: {token_ids[around]}, not {list(want.token_ids[around])}")
            break
    if len(token_ids) > len(want.token_ids):
        wrong.append(f"{len(token_ids)} tokens came, not {len(want.token_ids)}")
    if not want.text.startswith(got.text):
        wrong.append(f"the text is {got.text!r}, not the beginning of {want.text!r}")
    return wrong + ([] if wrong or want.logprobs is None else _judge_logprobs(want.logprobs, got.tokens))


def _judge_logprobs(want: Sequence[float], got: Sequence[GeneratedToken]) -> list[str]:
    for at, (token, right) in enumerate(zip(got, want, strict=False)):
        if token.logprobs is None:
            return [f"token {at} has no logprobs"]
        mine = token.logprobs.chosen
        if mine.token_id != token.token_id or abs(mine.logprob - right) > LOGPROB_TOLERANCE:
            return [f"token {at}'s logprob is {mine}, not {right} of token {token.token_id}"]
    return []
