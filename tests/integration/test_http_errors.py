"""What the HTTP door refuses, and how: status, OpenAI's shape, the field's name. Nothing is left of it, and nothing is
a 500."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from kvrelay.errors import InvalidRequestError, KVRelayError
from tests.support.coordinator_ends import TIMEOUT_S
from tests.support.fake_nodes import ANSWER_TEXT
from tests.support.http_ends import HELLO, HttpEnds, data_of, error_of, http_ends

# Fields of a chat that is right but for them; the field that is named, and words of the message.
BAD_CHATS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "messages has 0 entries"),
    ({"messages": "hi"}, "messages", "messages is 'hi'"),
    ({"messages": [1]}, "messages[0]", "messages[0] is 1"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role is missing"),
    ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role", "allowed are system, developer, user"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "messages[0].content is 5"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0]", "a part of type 'image_url'; allowed is text"),
    ({"messages": [{"role": "user", "content": "x", "audio": {"id": "y"}}]}, "messages[0].audio", "is not served"),
    ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "messages[0].colour", "no field of this"),
    ({"temprature": 1}, "temprature", "temprature is no field of this request; leave it out"),
    ({"temperature": "0.5"}, "temperature", "temperature is '0.5'"),
    ({"temperature": 2.1}, "temperature", "temperature is 2.1; allowed is [0, 2]"),
    ({"top_p": 0.0}, "top_p", "top_p is 0.0; allowed is (0, 1]"),
    ({"top_k": -5}, "top_k", "top_k is -5"),
    ({"n": 0}, "n", "n is 0; allowed is [1, 128]"),
    ({"n": 129}, "n", "n is 129"),
    ({"n": True}, "n", "n is true"),
    ({"seed": -1}, "seed", "seed is -1"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "send one of them, or the same"),
    ({"stop": ""}, "stop", "stop holds an empty string"),
    ({"stop": ["", ":"]}, "stop", "stop holds an empty string"),
    ({"stop": [1]}, "stop[0]", "stop[0] is 1"),
    ({"stop": ["x"] * 17}, "stop", "stop has 17 entries"),
    ({"logit_bias": {"259": 1}}, "logit_bias", "logit_bias holds 259"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "logit_bias holds -1"),
    ({"logit_bias": {"abc": 1}}, "logit_bias", "the key 'abc'; allowed are token ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias[5] is 101"),
    ({"stop_token_ids": [259]}, "stop_token_ids", "stop_token_ids holds 259"),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs is 2, but logprobs is not true"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs", "logprobs is 21"),
    ({"logprobs": True, "top_logprobs": -1}, "logprobs", "logprobs is -1"),
    ({"logprobs": 2}, "logprobs", "logprobs is 2"),
    ({"cache_salt": ""}, "cache_salt", "cache_salt is empty"),
    ({"priority": 101}, "priority", "priority is -101"),
    ({"priority": 1, "service_tier": "flex"}, "priority", "are both set"),
    ({"service_tier": "scale"}, "service_tier", "service_tier is 'scale'"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "tools[0].type is 'web_search'"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice is 'required', but there are no tools"),
    ({"functions": [{"name": "f"}]}, "functions", "tools took its place; allowed is null or []"),
    ({"audio": {"voice": "x"}}, "audio", "answers are text; allowed is null"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "response_format.type is 'xml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "is missing"),
    ({"structured_outputs": {"backend": "x"}}, "structured_outputs.backend", "there is one backend"),
    ({"structured_outputs": {"json": {}}, "guided_regex": "a"}, "response_format", "to several things (regex, json_"),
    ({"echo": True}, "echo", "echo is true, which is not served"),
    ({"request_id": "a b\n"}, None, "request"),
]  # fmt: skip

# Bodies as bytes.
BAD_BODIES: list[tuple[bytes, str]] = [
    (b"", "not JSON"),
    (b"null", "the body is null; allowed is a JSON object"),
    (b"[]", "the body is []"),
    (b"{", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b'{"messages": "\\ud800"}', "not JSON"),
    (b"[" * 5000, "not JSON"),
    (b'{"a":' * 5000 + b"1" + b"}" * 5000, "not JSON"),
    *((b'{"messages": [{"role":"user","content":"x"}], "temperature": %s}' % number, words)
      for number, words in ((b"NaN", "not JSON"), (b"Infinity", "not JSON"), (b"-Infinity", "not JSON"),
                            (b"1e999", "temperature is inf"), (b'"nan"', "temperature is 'nan'"))),
]  # fmt: skip


async def test_each_bad_field_is_named() -> None:
    async with http_ends() as ends:
        for fields, param, words in BAD_CHATS:
            reply = await ends.post("/v1/chat/completions", HELLO | fields)
            assert reply.status_code == 400, fields
            error = error_of(reply)
            assert (error["param"], error["type"]) == (param, "invalid_request_error"), error
            assert words in error["message"], error
            assert reply.headers["x-should-retry"] == "false"
        await ends.cluster.check_idle()
        assert await ends.chat()


async def test_bodies_that_are_no_request_are_refused() -> None:
    async with http_ends() as ends:
        for body, words in BAD_BODIES:
            reply = await ends.http.post("/v1/chat/completions", content=body)
            assert reply.status_code == 400, body[:40]
            assert words in error_of(reply)["message"]


async def test_a_body_over_the_bound_is_refused_whether_or_not_its_length_is_announced() -> None:
    async def pieces() -> Any:
        for _ in range(9):
            yield b"x" * 2**20

    async with http_ends() as ends:
        for content in (b"x" * (8 * 2**20 + 1), pieces()):
            reply = await ends.http.post("/v1/completions", content=content)
            assert (reply.status_code, error_of(reply)["code"]) == (413, "request_too_large")


async def test_what_is_not_there_is_said_in_the_same_shape() -> None:
    async with http_ends() as ends:
        for method, path, status, code in (
            ("GET", "/v1/nothing", 404, "not_found"),
            ("GET", "//v1/models", 404, "not_found"),
            ("GET", "/V1/models", 404, "not_found"),
            ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
            ("DELETE", "/v1/models/bytes", 405, "method_not_allowed"),
            ("GET", "/v1/models/other", 404, "model_not_found"),
        ):
            reply = await ends.http.request(method, path)
            assert (reply.status_code, error_of(reply)["code"]) == (status, code)
        reply = await ends.post("/v1/chat/completions", HELLO | {"model": "other"})
        assert (reply.status_code, error_of(reply)["code"]) == (404, "model_not_found")
        assert (await ends.http.get("/v1/models/bytes")).json()["max_model_len"] == 1024


async def test_a_full_queue_is_too_many_requests_with_advice_when_to_come_back() -> None:
    async with http_ends(max_queue=1) as ends:
        ends.cluster.decode[0].at["reserve"].hold()
        waiting = asyncio.create_task(ends.chat())
        await ends.cluster.decode[0].until_reached("reserve")
        with pytest.raises(openai.RateLimitError) as caught:
            await ends.openai.chat.completions.create(model="bytes", messages=HELLO["messages"])  # type: ignore[arg-type]
        reply = caught.value.response
        assert error_of(reply)["type"] == "rate_limit_error"
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.headers["x-should-retry"] == "true"
        ends.cluster.decode[0].at["reserve"].let_go()
        await waiting


async def test_what_fails_before_the_first_token_has_its_status_also_in_a_stream() -> None:
    async with http_ends() as ends:
        ends.cluster.decode[0].at["token"].failures = [InvalidRequestError("not like this")]
        reply = await ends.post("/v1/chat/completions", HELLO | {"stream": True})
        assert (reply.status_code, error_of(reply)["message"]) == (400, "not like this")


async def test_what_fails_later_is_the_streams_last_event() -> None:
    async with http_ends() as ends:
        ends.cluster.decode[0].at["token"].failures = [None, None, InvalidRequestError("not like this")]
        reply = await ends.post("/v1/chat/completions", HELLO | {"stream": True})
        assert reply.status_code == 200
        *chunks, last = [json.loads(event) for event in data_of(reply.text)]
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "Th"
        assert last["error"]["code"] == "invalid_request"
        ends.cluster.decode[0].at["token"].failures = [None, None, InvalidRequestError("not like this")]
        with pytest.raises(openai.APIError, match="not like this"):
            async for _ in await ends.openai.chat.completions.create(
                model="bytes",
                messages=HELLO["messages"],  # type: ignore[arg-type]
                stream=True,
            ):
                pass


async def test_a_request_has_its_clients_id_or_one_of_ours() -> None:
    async with http_ends() as ends:
        reply = await ends.post("/v1/chat/completions", HELLO, **{"x-request-id": "mine"})
        assert (reply.headers["x-request-id"], reply.json()["id"]) == ("mine", "chatcmpl-mine")
        named = await ends.post("/v1/chat/completions", HELLO | {"request_id": "named"})
        assert (named.headers["x-request-id"], named.json()["id"]) == ("named", "chatcmpl-named")
        made = await ends.post("/v1/chat/completions", HELLO)
        assert made.json()["id"] == f"chatcmpl-{made.headers['x-request-id']}"
        assert len((await ends.http.get("/health")).headers["x-request-id"]) == 32
        for bad in ("x" * 129, "\u00e9"):
            refused = await ends.http.post(
                "/v1/chat/completions", json=HELLO, headers={"x-request-id": bad.encode("latin-1")}
            )
            assert refused.status_code == 400
            assert len(refused.headers["x-request-id"]) == 32


async def test_an_id_that_runs_is_refused_to_others() -> None:
    async with http_ends() as ends:
        ends.cluster.decode[0].at["token"].hold()
        first = asyncio.create_task(ends.post("/v1/chat/completions", HELLO, **{"x-request-id": "same"}))
        await ends.cluster.decode[0].until_reached("token")
        second = await ends.post("/v1/chat/completions", HELLO, **{"x-request-id": "same"})
        assert (second.status_code, error_of(second)["code"]) == (409, "duplicate_request_id")
        ends.cluster.decode[0].at["token"].let_go()
        assert (await first).json()["choices"][0]["message"]["content"] == ANSWER_TEXT


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["reserve", "token"])
async def test_a_client_that_leaves_ends_its_request(stage: str, stream: bool) -> None:
    async with http_ends() as ends:
        ends.cluster.decode[0].at[stage].hold()
        connection = await _asked(ends, HELLO | {"stream": stream})
        await ends.cluster.decode[0].until_reached(stage)
        connection.close()
        await ends.cluster.until_status(lambda status: status.num_queued == status.num_running == 0)
        ends.cluster.decode[0].at[stage].let_go()
        await ends.cluster.check_idle()
        assert ends.cluster.metric("kvrelay_errors_total", code="cancelled") == 1


async def _asked(ends: HttpEnds, body: dict[str, Any]) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", ends.cluster.app.http_port)
    content = json.dumps(body).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content
    )
    await writer.drain()
    return writer


async def test_health_is_that_of_the_cluster_and_liveness_of_the_process() -> None:
    async with http_ends() as ends:
        for path in ("/health", "/ready", "/live"):
            assert (await ends.http.get(path)).status_code == 200
        ends.cluster.prefill[0].ready = False
        ends.cluster.prefill[0].tell()
        async with asyncio.timeout(TIMEOUT_S):
            while (reply := await ends.http.get("/ready")).status_code == 200:
                pass
        assert reply.status_code == 503
        assert "prefill" in reply.json()["reason"]
        assert (await ends.http.get("/health")).status_code == 503
        assert (await ends.http.get("/live")).status_code == 200
        refused = await ends.post("/v1/chat/completions", HELLO)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


async def test_a_drain_lets_streams_end_and_takes_nothing_new() -> None:
    async with http_ends() as ends:
        ends.cluster.decode[0].at["token"].hold()
        running = asyncio.create_task(ends.chat_events())
        await ends.cluster.decode[0].until_reached("token")
        draining = asyncio.create_task(ends.cluster.app.drain(TIMEOUT_S))
        async with asyncio.timeout(TIMEOUT_S):
            while (reply := await ends.post("/v1/chat/completions", HELLO)).status_code == 409:
                pass
        assert (reply.status_code, error_of(reply)["code"]) == (503, "unavailable")
        ends.cluster.decode[0].at["token"].let_go()
        chunks = await running
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        await draining


async def test_a_fault_of_ours_is_told_without_its_details(monkeypatch: pytest.MonkeyPatch) -> None:
    async with http_ends() as ends:

        async def broken(*_: object) -> None:
            raise RuntimeError("a secret")

        monkeypatch.setattr(ends.cluster.app.door, "accept", broken)
        reply = await ends.post("/v1/chat/completions", HELLO)
        assert (reply.status_code, error_of(reply)["code"]) == (500, KVRelayError.code)
        assert "secret" not in reply.text
