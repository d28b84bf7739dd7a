"""The answers to several prompts of one HTTP request, merged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from coordinator.http.answers import Answers, Grew
from kvrelay.errors import UnavailableError
from kvrelay.inference import GenerateEvent, RequestFailed, TokensGenerated

TIMEOUT_S = 30.0
GREW = TokensGenerated((), "x")


class Prompt:
    """One whose events are all there already."""

    def __init__(self, *events: GenerateEvent) -> None:
        self._events = events

    async def events(self) -> AsyncIterator[GenerateEvent]:
        for event in self._events:
            yield event

    def left(self) -> None:
        pass


class BrokenPrompt(Prompt):
    async def events(self) -> AsyncIterator[GenerateEvent]:
        async for event in super().events():
            yield event
        raise RuntimeError("broke")


async def _read_all(answers: Answers) -> int:
    async with aclosing(answers.events()) as events:
        return len([event async for event in events if isinstance(event, Grew)])


async def test_every_event_of_several_prompts_is_told() -> None:
    answers = Answers([Prompt(*[GREW] * 100), Prompt(*[GREW] * 50)], n=1)
    assert await asyncio.wait_for(_read_all(answers), TIMEOUT_S) == 150


async def test_who_leaves_while_much_is_unread_is_not_held() -> None:
    answers = Answers([Prompt(*[GREW] * 100), Prompt(*[GREW] * 100)], n=1)

    async def leave() -> None:
        async with aclosing(answers.events()) as events:
            await anext(events)
            await asyncio.sleep(0)  # the prompts' readers go on, as far as they may

    await asyncio.wait_for(leave(), TIMEOUT_S)


async def test_one_prompt_that_fails_ends_the_others_though_much_of_them_is_unread() -> None:
    failed = RequestFailed("unavailable", "a node died", retryable=True)
    answers = Answers([Prompt(failed), Prompt(*[GREW] * 100), Prompt(*[GREW] * 100)], n=1)
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(_read_all(answers), TIMEOUT_S)


async def test_a_prompt_whose_reading_breaks_is_no_complete_answer() -> None:
    answers = Answers([Prompt(GREW), BrokenPrompt(GREW)], n=1)
    with pytest.raises(RuntimeError):
        await asyncio.wait_for(_read_all(answers), TIMEOUT_S)
