"""What a caller was given of a request's answers, so that nothing of them is given twice, lost or changed. Pure."""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass, field

from kvrelay.errors import AnswerDiffersError
from kvrelay.inference import ChoiceFinished, RequestAccepted, RequestFinished, TokensGenerated

AnswerEvent = RequestAccepted | TokensGenerated | ChoiceFinished | RequestFinished


@dataclass(slots=True)
class _Answer:
    """`num_tokens` and `num_chars` are of the sending that is read now: behind what was given while it is repeated."""

    token_ids: array[int] = field(default_factory=lambda: array("I"))
    num_chars_given: int = 0
    num_tokens: int = 0
    num_chars: int = 0
    has_ended: bool = False


class Delivered:
    def __init__(self) -> None:
        self.accepted: RequestAccepted | None = None
        self._answers: defaultdict[int, _Answer] = defaultdict(_Answer)

    def begin_again(self) -> None:
        """The next event is the first one of the same request, sent once more."""
        for answer in self._answers.values():
            answer.num_tokens = answer.num_chars = 0

    def take(self, event: AnswerEvent) -> AnswerEvent | None:
        """What the caller has not been given of an event; None when that is nothing. Raises AnswerDiffersError."""
        match event:
            case RequestAccepted():
                return self._accepted(event)
            case TokensGenerated():
                return self._tokens(event, self._answers[event.index])
            case ChoiceFinished():
                return self._ended(event, self._answers[event.index])
            case RequestFinished():
                for index, answer in self._answers.items():
                    _check_whole(index, answer)
                return event

    def _accepted(self, event: RequestAccepted) -> RequestAccepted | None:
        before = self.accepted
        if before is None:
            self.accepted = event
            return event
        if (before.prompt_tokens, before.seed) != (event.prompt_tokens, event.seed):
            raise AnswerDiffersError(
                f"sent again, the request has {event.prompt_tokens} prompt tokens and the seed {event.seed}; it had "
                f"{before.prompt_tokens} and {before.seed}. Do all coordinators serve the same model?"
            )
        return None

    def _tokens(self, event: TokensGenerated, answer: _Answer) -> TokensGenerated | None:
        given = answer.token_ids[answer.num_tokens : answer.num_tokens + len(event.tokens)]
        for number, (token_id, token) in enumerate(zip(given, event.tokens, strict=False), answer.num_tokens):
            if token_id != token.token_id:
                raise AnswerDiffersError(
                    f"sent again, the request got another answer: token {number} of answer {event.index} is "
                    f"{token.token_id} and was {token_id}; what was given does not go on so, ask anew (nodes in "
                    "bfloat16 give the same tokens with --weights dtype only)"
                )
        tokens, text = event.tokens[len(given) :], event.text
        answer.token_ids.extend(token.token_id for token in tokens)
        answer.num_tokens += len(event.tokens)
        if answer.num_chars < answer.num_chars_given:
            text = text[answer.num_chars_given - answer.num_chars :]
        answer.num_chars += len(event.text)
        answer.num_chars_given = max(answer.num_chars_given, answer.num_chars)
        return TokensGenerated(tokens, text, event.index) if tokens or text else None

    def _ended(self, event: ChoiceFinished, answer: _Answer) -> ChoiceFinished | None:
        _check_whole(event.index, answer)
        had_ended, answer.has_ended = answer.has_ended, True
        return None if had_ended else event


def _check_whole(index: int, answer: _Answer) -> None:
    if answer.num_tokens < len(answer.token_ids):
        raise AnswerDiffersError(
            f"sent again, the request got a shorter answer: answer {index} has {answer.num_tokens} tokens and had "
            f"{len(answer.token_ids)} so far"
        )
