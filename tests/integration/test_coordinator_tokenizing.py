"""Huge prompts at a coordinator's door: what they cost those who are being answered."""

from __future__ import annotations

import asyncio
import threading

import pytest

from coordinator.text import MAX_CHARS, THREAD_CHARS
from kvrelay.errors import PromptTooLongError
from kvrelay.inference import ChatMessage, ChatPrompt, TextPrompt
from tests.support.coordinator_ends import TIMEOUT_S, ends
from tests.support.fake_nodes import ANSWER_IDS


async def test_streams_and_small_calls_go_on_while_a_huge_prompt_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#10635, FastChat#3793."""
    async with ends() as cluster:
        tokenizer, asked, go_on = cluster.app.door.models.find("").text.tokenizer, threading.Event(), threading.Event()
        encode = tokenizer.encode

        def encode_when_told(source: str, *, add_bos: bool) -> list[int]:
            if len(source) > THREAD_CHARS:
                asked.set()
                assert go_on.wait(TIMEOUT_S)
            return encode(source, add_bos=add_bos)

        monkeypatch.setattr(tokenizer, "encode", encode_when_told)
        try:
            huge = asyncio.create_task(cluster.ask(TextPrompt("a" * (THREAD_CHARS + 1))))
            assert await asyncio.to_thread(asked.wait, TIMEOUT_S)
            answers = await asyncio.gather(*(cluster.ask() for _ in range(4)))
            assert [answer.token_ids for answer in answers] == [ANSWER_IDS] * 4
            assert (await cluster.client.status()).ready
            assert not huge.done()
        finally:
            go_on.set()
        with pytest.raises(PromptTooLongError, match=f"the prompt has {THREAD_CHARS + 1} tokens"):
            await huge


async def test_what_is_too_long_for_any_model_is_refused_before_it_is_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ends() as cluster:
        tokenizer = cluster.app.door.models.find("").text.tokenizer
        monkeypatch.setattr(tokenizer, "encode", None)  # a call would fail
        many = ChatPrompt(tuple(ChatMessage("user", "aaaaaaaa") for _ in range(5_000)))
        for prompt in (TextPrompt("a" * MAX_CHARS), many):
            with pytest.raises(PromptTooLongError, match="a prompt of 1024 tokens has"):
                await cluster.ask(prompt)
