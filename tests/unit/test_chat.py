"""A conversation on the command line."""

from __future__ import annotations

import asyncio
import io
import json

import pytest

from kvrelay import chat
from kvrelay.errors import UnavailableError
from kvrelay.inference import ChatMessage
from kvrelay.types import CachedTokens
from tests.support.coordinator_ends import Ends, ends
from tests.support.fake_nodes import ANSWER_TEXT

SYSTEM = "0123456789" * 8  # so long that a prompt is no tail


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def talk(cluster: Ends, turns: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(turns))
    return await asyncio.to_thread(chat.main, ["--address", cluster.address, "--system", SYSTEM, *flags])


def rendered(cluster: Ends, request: int) -> str:
    tokenizer = next(iter(cluster.app.door.models)).text.tokenizer
    return tokenizer.decode(cluster.decode[0].requests[request].token_ids)


def test_a_conversation_has_its_turns_in_order() -> None:
    conversation = chat.Conversation("be brief")
    conversation.answered("one", "1")
    assert conversation.ask("two").messages == (
        ChatMessage("system", "be brief"),
        ChatMessage("user", "one"),
        ChatMessage("assistant", "1"),
        ChatMessage("user", "two"),
    )
    conversation.clear()
    assert conversation.ask("three").messages == (ChatMessage("system", "be brief"), ChatMessage("user", "three"))


async def test_each_turn_brings_what_was_said_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with ends() as cluster:
        cluster.prefill[0].cached = CachedTokens(memory=48)
        assert await talk(cluster, "first\n\nsecond\n/clear\nthird\n/exit\nnever\n", monkeypatch) == 0
        printed = capsys.readouterr().out
        assert printed.count(ANSWER_TEXT) == 3
        assert printed.count("(cached: 48 memory)") == 3
        assert len(cluster.decode[0].requests) == 3
        assert rendered(cluster, 1).count(ANSWER_TEXT) == 1
        assert "first" in rendered(cluster, 1)
        assert "first" not in rendered(cluster, 2)


async def test_who_sits_at_a_terminal_is_told_how_to_leave(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("/exit\n"))
    async with ends() as cluster:
        assert await asyncio.to_thread(chat.main, ["--address", cluster.address]) == 0
    assert capsys.readouterr().out == "/clear begins anew, /exit or Ctrl-D leaves, Ctrl-C ends an answer\n> "


async def test_json_is_one_object_a_turn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async with ends() as cluster:
        assert await talk(cluster, "first\nsecond\n", monkeypatch, "--json", "--max-tokens", "3") == 0
        described = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["text"] for one in described] == [ANSWER_TEXT[:3]] * 2


async def test_a_turn_that_fails_is_told_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with ends(max_retries=0) as cluster:
        cluster.prefill[0].at["start"].failures = [UnavailableError("out of order")]
        assert await talk(cluster, "first\nsecond\n", monkeypatch) == 1
        printed = capsys.readouterr()
        assert printed.err == "kvrelay chat: out of order\n"
        assert printed.out.count(ANSWER_TEXT) == 1
        assert "first" not in rendered(cluster, -1)


def test_nobody_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert chat.main(["--address", "127.0.0.1:1"]) == 1
    assert "no coordinator answers at 127.0.0.1:1" in capsys.readouterr().err


def test_what_makes_no_sense_is_refused_before_anything_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main(["--temperature", "3"]) == 2
    assert capsys.readouterr().err == "kvrelay chat: temperature is 3.0; allowed is [0, 2]\n"
    for seconds in ("nan", "0", "inf"):
        assert chat.main(["--timeout", seconds]) == 2
        assert (
            capsys.readouterr().err == f"kvrelay chat: --timeout is {seconds}; allowed is a number of seconds over 0\n"
        )
