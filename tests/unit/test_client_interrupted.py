"""The blocking client is interrupted in the middle of an answer."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any

import pytest

from kvrelay.client import AnswerEvent, Client
from kvrelay.inference import RequestAccepted, TextPrompt
from kvrelay.types import RequestId

ACCEPTED = RequestAccepted(RequestId("mine"), 1, 7, 100)


@pytest.fixture
def client() -> Iterator[Client]:
    with Client("127.0.0.1:1") as ours:
        yield ours


def test_ctrl_c_while_it_waits_is_what_the_caller_gets_once_the_request_is_cancelled(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelling takes a call of its own, as with keep_s."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals come to the main thread")
    cancelled: list[str] = []

    async def answer(*args: Any, **kwargs: Any) -> AsyncGenerator[AnswerEvent, None]:
        yield ACCEPTED
        try:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            for _ in range(20):
                await asyncio.sleep(0)
            cancelled.append("mine")
            raise

    monkeypatch.setattr(client._client, "generate", answer)
    events = client.generate(TextPrompt("hello"), keep_s=30.0)
    assert next(events) == ACCEPTED
    with pytest.raises(KeyboardInterrupt):
        next(events)
    assert cancelled == ["mine"]


def test_an_answer_is_left_although_nobody_cancelled_the_wait_for_its_next_event(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C came when the wait had begun and its caller did not know of it yet."""
    ended: list[str] = []

    async def answer(*args: Any, **kwargs: Any) -> AsyncGenerator[AnswerEvent, None]:
        yield ACCEPTED
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("mine")

    def interrupted(work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, client._loop)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(client._client, "generate", answer)
    events = client.generate(TextPrompt("hello"))
    assert next(events) == ACCEPTED
    monkeypatch.setattr(client, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(events)
    assert ended == ["mine"]
