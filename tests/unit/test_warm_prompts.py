"""The file that `kvrelay store warm` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrelay.errors import InvalidRequestError
from kvrelay.inference import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from kvrelay.warm_prompts import CacheWishes, WarmPrompt, read_lines, read_prompts


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        ({"text": "a\u2028b"}, TextPrompt("a\u2028b")),
        ({"token_ids": [1, 2**32 - 1]}, TokenPrompt((1, 2**32 - 1))),
        ({"messages": [{"role": "system", "content": "x"}]}, ChatPrompt((ChatMessage("system", "x"),))),
    ],
)
def test_prompts(line: dict[str, Any], prompt: Prompt) -> None:
    assert list(read_prompts([json.dumps(line, ensure_ascii=False)], CacheWishes())) == [
        WarmPrompt(1, prompt, CacheWishes())
    ]


def test_lines_keep_their_numbers_and_empty_ones_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "a\u2028b"}\n\n  \n{"text": "b"}\n', encoding="utf-8")
    assert [prompt.line for prompt in read_prompts(read_lines(str(file)), CacheWishes())] == [1, 4]


@pytest.mark.parametrize(
    ("line", "wishes"),
    [
        ({}, CacheWishes("s", "", 60.0)),
        ({"cache_salt": "t"}, CacheWishes("t", "", 60.0)),
        ({"public_cache": "docs"}, CacheWishes(None, "docs", 60.0)),
        ({"cache_salt": None}, CacheWishes(None, "", 60.0)),
        ({"cache_ttl": "5m"}, CacheWishes("s", "", 300.0)),
        ({"cache_ttl": 90}, CacheWishes("s", "", 90.0)),
        ({"cache_ttl": "none"}, CacheWishes("s", "", 0.0)),
    ],
)
def test_a_line_may_say_otherwise_than_the_command(line: dict[str, Any], wishes: CacheWishes) -> None:
    [prompt] = read_prompts([json.dumps({"text": "a", **line})], CacheWishes("s", "", 60.0))
    assert prompt.cache == wishes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "no JSON: "),
        ("[1]", "no JSON object; write one such as"),
        ("[" * 100_000, "no JSON"),
        ('{"text": "a", "n": 2}', "unknown key 'n'; allowed are text, messages, token_ids, cache_salt"),
        ("{}", "a prompt is one of text"),
        ('{"text": "a", "token_ids": [1]}', "a prompt is one of text"),
        ('{"text": 1}', "a prompt is one of text"),
        ('{"token_ids": [true]}', "a prompt is one of text"),
        ('{"token_ids": [-1]}', "a prompt is one of text"),
        ('{"messages": "hello"}', "a prompt is one of text"),
        ('{"messages": [{"role": "user"}]}', "a message is an object such as"),
        ('{"text": "a", "cache_ttl": -1}', "cache_ttl is -1; write a time such as 5m or 1h, or none"),
        ('{"text": "a", "cache_salt": 1}', "cache_salt is 1; write a string"),
    ],
)
def test_what_is_no_prompt_is_told_with_its_line(line: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^line 2: {message}"):
        list(read_prompts(['{"text": "fine"}', line], CacheWishes()))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"cannot read the prompts in .*missing: No such file or directory$"):
        read_lines(str(tmp_path / "missing"))
