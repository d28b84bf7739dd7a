"""Several whole answers to one prompt, put together from their events, which are checked meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from kvrelay.client import AnswerEvent
from kvrelay.inference import ChoiceFinished, RequestAccepted, RequestFinished, TokensGenerated
from kvrelay.sampling import GeneratedToken


@dataclass
class Choices:
    """By index."""

    accepted: RequestAccepted
    tokens: dict[int, list[GeneratedToken]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, ChoiceFinished] = field(default_factory=dict)
    finished: RequestFinished | None = None

    def token_ids(self, index: int) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.tokens[index])

    def add(self, event: AnswerEvent) -> None:
        assert self.finished is None, "an event after the last one"
        match event:
            case TokensGenerated():
                assert event.index not in self.ends, "more of an answer that was complete"
                self.tokens.setdefault(event.index, []).extend(event.tokens)
                self.texts[event.index] = self.texts.get(event.index, "") + event.text
            case ChoiceFinished():
                assert event.index not in self.ends, "complete twice"
                assert event.completion_tokens == len(self.tokens[event.index])
                self.ends[event.index] = event
            case RequestFinished():
                self.finished = event
            case RequestAccepted():
                raise AssertionError("accepted twice")


async def collect_choices(events: AsyncIterator[AnswerEvent]) -> Choices:
    choices: Choices | None = None
    async for event in events:
        if choices is None:
            assert isinstance(event, RequestAccepted)
            choices = Choices(event)
        else:
            choices.add(event)
    assert choices is not None
    assert choices.finished is not None
    assert choices.finished.usage.completion_tokens == sum(map(len, choices.tokens.values()))
    return choices
