"""Long texts are tokenized beside the event loop, and only so many wait for that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.text import MAX_LONG_TEXTS, THREAD_CHARS, LongTexts, Text
from kvrelay.errors import OverloadedError
from kvrelay.inference import ChatMessage, ChatPrompt, Prompt, TextPrompt
from kvrelay.tokenizer import Tokenizer, load_tokenizer
from tests.support.byte_tokenizer import make_byte_tokenizer

LONG = "x" * (THREAD_CHARS + 1)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(make_byte_tokenizer(tmp_path))


@contextmanager
def busy(text: Text, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No text that goes to a thread is tokenized before the event is set."""
    go_on, encode = threading.Event(), text.tokenizer.encode

    def wait_and_encode(source: str, *, add_bos: bool) -> list[int]:
        if len(source) > THREAD_CHARS:
            assert go_on.wait(10)
        return encode(source, add_bos=add_bos)

    monkeypatch.setattr(text.tokenizer, "encode", wait_and_encode)
    try:
        yield go_on
    finally:
        go_on.set()
        text.long_texts.close()


@pytest.mark.parametrize("one_more", [TextPrompt(LONG), ChatPrompt((ChatMessage("user", LONG),))], ids=["text", "chat"])
async def test_long_texts_beyond_the_bound_are_turned_away_and_short_ones_pass(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, one_more: Prompt
) -> None:
    text = Text(tokenizer, LongTexts())
    with busy(text, monkeypatch) as go_on:
        waiting = [asyncio.create_task(text.prompt_ids(TextPrompt(LONG), 259)) for _ in range(MAX_LONG_TEXTS)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match=f"{MAX_LONG_TEXTS} long texts") as refused:
            await text.prompt_ids(one_more, 259)
        assert refused.value.retry_after_s >= 1.0
        assert len(await text.prompt_ids(TextPrompt("short"), 259)) == 5
        go_on.set()
        assert {len(ids) for ids in await asyncio.gather(*waiting)} == {len(LONG)}
        assert len(await text.prompt_ids(TextPrompt(LONG), 259)) == len(LONG)


async def test_one_who_gives_up_makes_room(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text(tokenizer, LongTexts())
    with busy(text, monkeypatch) as go_on:
        waiting = [asyncio.create_task(text.prompt_ids(TextPrompt(LONG), 259)) for _ in range(MAX_LONG_TEXTS)]
        await asyncio.sleep(0)
        waiting[-1].cancel()
        await asyncio.wait([waiting[-1]])
        another = asyncio.create_task(text.prompt_ids(TextPrompt(LONG), 259))
        go_on.set()
        assert len(await another) == len(LONG)
        await asyncio.gather(*waiting[:-1])
