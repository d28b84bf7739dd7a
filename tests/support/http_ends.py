"""A coordinator's HTTP door on a real socket, before fake nodes, and clients of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from tests.support.coordinator_ends import TIMEOUT_S, Ends, ends

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100}


@dataclass(slots=True)
class HttpEnds:
    cluster: Ends
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers=headers)

    async def chat(self, **fields: Any) -> dict[str, Any]:
        """What comes back whole."""
        return read(await self.post("/v1/chat/completions", HELLO | fields))

    async def complete(self, **fields: Any) -> dict[str, Any]:
        return read(await self.post("/v1/completions", {"prompt": "hello", "max_tokens": 100, **fields}))

    async def chat_events(self, **fields: Any) -> list[dict[str, Any]]:
        return await self.events("/v1/chat/completions", HELLO | fields)

    async def completion_events(self, **fields: Any) -> list[dict[str, Any]]:
        return await self.events("/v1/completions", {"prompt": "hello", "max_tokens": 100, **fields})

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Of a stream that ends well: every event but [DONE]."""
        reply = await self.post(path, {**body, "stream": True})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = data_of(reply.text)
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]


def data_of(text: str) -> list[str]:
    """Strictly: each event is one line of data and an empty one."""
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


def read(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def error_of(reply: httpx.Response) -> dict[str, Any]:
    """In OpenAI's shape, with no other keys."""
    body = reply.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    error: dict[str, Any] = body["error"]
    return error


@asynccontextmanager
async def http_ends(*args: Any, **settings: Any) -> AsyncIterator[HttpEnds]:
    """As `ends`: at the end everything must be idle."""
    async with ends(*args, http_port=0, **settings) as cluster:
        url = f"http://127.0.0.1:{cluster.app.http_port}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client,
        ):
            yield HttpEnds(cluster, http, client)
