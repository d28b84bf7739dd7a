"""The file of `kvrelay store warm`: one prompt a line, as a JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.duration import parse_duration
from kvrelay.errors import InvalidRequestError
from kvrelay.inference import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt

_PROMPT_KEYS = ("text", "messages", "token_ids")
_CACHE_KEYS = ("cache_salt", "public_cache", "cache_ttl")


@dataclass(frozen=True, slots=True)
class CacheWishes:
    """What GenerateRequest says of caching."""

    salt: str | None = None
    public: str = ""
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    line: int
    prompt: Prompt
    cache: CacheWishes


def read_lines(file: str) -> list[str]:
    """Of a file, or of stdin for "-". Raises InvalidRequestError."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
    except OSError as error:
        raise InvalidRequestError(f"cannot read the prompts in {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the prompts in {file} are no UTF-8 text: {error}") from error
    return text.split("\n")  # and at nothing else that str.splitlines takes for the end of a line


def read_prompts(lines: Sequence[str], wishes: CacheWishes) -> Iterator[WarmPrompt]:
    """Empty lines are skipped; `wishes` hold where a line has none of its own. Raises InvalidRequestError that names
    the line."""
    for number, text in enumerate(lines, 1):
        if text.strip():
            try:
                found = _object(text)
                yield WarmPrompt(number, _prompt(found), _wishes(found, wishes))
            except InvalidRequestError as error:
                raise InvalidRequestError(f"line {number}: {error.message}") from error


def _object(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequestError('no JSON object; write one such as {"text": "..."}')
    unknown = sorted(found.keys() - {*_PROMPT_KEYS, *_CACHE_KEYS})
    if unknown:
        allowed = ", ".join((*_PROMPT_KEYS, *_CACHE_KEYS))
        raise InvalidRequestError(f"unknown key {unknown[0]!r}; allowed are {allowed}")
    return found


def _prompt(line: Mapping[str, Any]) -> Prompt:
    given = [name for name in _PROMPT_KEYS if name in line]
    match given, [line[name] for name in given]:
        case ["text"], [str(text)]:
            return TextPrompt(text)
        case ["token_ids"], [list(token_ids)] if all(type(one) is int and 0 <= one < 2**32 for one in token_ids):
            return TokenPrompt(tuple(token_ids))
        case ["messages"], [list(messages)]:
            return ChatPrompt(tuple(_message(one) for one in messages))
    raise InvalidRequestError("a prompt is one of text (a string), messages (a list) and token_ids (a list of ids)")


def _message(value: Any) -> ChatMessage:
    match value:
        case {"role": str(role), "content": str(content)}:
            return ChatMessage(role, content)
    raise InvalidRequestError('a message is an object such as {"role": "system", "content": "..."}')


def _wishes(line: Mapping[str, Any], others: CacheWishes) -> CacheWishes:
    salt, public = others.salt, others.public
    if "cache_salt" in line or "public_cache" in line:  # they exclude each other, so the line's own replace both
        salt, public = _text(line, "cache_salt"), _text(line, "public_cache") or ""
    return CacheWishes(salt, public, _ttl_s(line["cache_ttl"]) if "cache_ttl" in line else others.ttl_s)


def _text(line: Mapping[str, Any], name: str) -> str | None:
    value = line.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequestError(f"{name} is {value!r}; write a string")
    return value


def _ttl_s(value: Any) -> float:
    try:
        return 0.0 if value == "none" else parse_duration(str(value))
    except ValueError as error:
        raise InvalidRequestError(f"cache_ttl is {value!r}; write a time such as 5m or 1h, or none") from error
