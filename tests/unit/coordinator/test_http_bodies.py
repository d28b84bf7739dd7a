"""Whatever a body holds, it is a request or it is refused with a KVRelayError that can be written as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from coordinator.http.body import Fields, parse
from coordinator.http.chat_request import ChatRequest
from coordinator.http.completion_request import CompletionRequest
from coordinator.http.errors import FieldError, error_response
from coordinator.http.responses_request import ResponsesRequest
from coordinator.http.tokens import DetokenizeRequest, TokenizeRequest
from kvrelay.errors import KVRelayError
from kvrelay.tool_prompt import ToolFormat

KINDS: list[type[Fields]] = [ChatRequest, CompletionRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest]
WORDS = st.sampled_from(
    ("", "user", "assistant", "tool", "text", "function", "auto", "required", "json_schema", "json_object", "\x00", "f")
)
KEYS = st.sampled_from(
    ("type", "role", "content", "text", "function", "name", "parameters", "arguments", "id", "call_id", "output",
     "json", "schema", "json_schema", "tool_calls", "tool_call_id", "strict", "format", "$defs", "regex", "1")
)  # fmt: skip
NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


def read(kind: type[Fields], body: bytes) -> None:
    """As far as a request is read before it goes to the front door."""
    request = parse(kind, body)
    match request:
        case ChatRequest():
            request.check_stream_options()
            use = request.tool_use(ToolFormat.HERMES)
            request.to_request(request.prompt(use.offered), request.sampling(request.most_tokens(), None), "id")
        case CompletionRequest():
            request.check_echo()
            for prompt in request.prompts():
                request.to_request(prompt, request.sampling(request.most_tokens, request.logprobs), "id")
        case ResponsesRequest():
            use = request.tool_use(ToolFormat.LLAMA3)
            request.to_request(request.prompt(use.offered), request.sampling(None, request.num_logprobs()), "id")
            json.dumps(request.text_format_body())
        case TokenizeRequest():
            request.to_prompt()


def status_of(kind: type[Fields], body: bytes) -> int:
    try:
        read(kind, body)
    except KVRelayError as error:
        return error_response(error).status_code
    return 200


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_values_in_any_fields(kind: type[Fields], data: st.DataObject) -> None:
    names = st.sampled_from(sorted({*kind.model_fields, *kind.refused, "unknown"}))
    body: dict[str, Any] = data.draw(st.dictionaries(names, VALUES, max_size=4))
    needed = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x", "tokens": [1]}
    body = {name: value for name, value in needed.items() if name in kind.model_fields} | body
    assert status_of(kind, json.dumps(body).encode()) in (200, 400)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": [0] * 1_000}),
        (ChatRequest, {"messages": [], "tools": [0] * 1_000}),
        (ChatRequest, {"messages": [], "stop": [0] * 1_000}),
        (ChatRequest, {"messages": [], "stop_token_ids": ["x"] * 1_000}),
        (ChatRequest, {"messages": [], "logit_bias": {str(token_id): "x" for token_id in range(1_000)}}),
        (ChatRequest, {"messages": [], "structured_outputs": {"choice": [0] * 1_000}}),
        (ChatRequest, {"messages": [], **{f"unknown_{number}": 0 for number in range(1_000)}}),
        (ResponsesRequest, {"input": [0] * 1_000}),
        (ResponsesRequest, {"input": "x", "include": [0] * 1_000}),
        (DetokenizeRequest, {"tokens": ["x"] * 1_000}),
    ],
)
def test_of_many_faults_few_are_looked_for(kind: type[Fields], body: dict[str, Any]) -> None:
    """A body of 8 MiB has room for millions, and to write each down holds up everyone for seconds."""
    with pytest.raises(FieldError) as refused:
        parse(kind, json.dumps(body).encode())
    cause = refused.value.__cause__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() <= 2  # of a union each kind has its own


def test_a_token_id_that_no_vocabulary_has_is_refused_before_the_request_is_made() -> None:
    with pytest.raises(FieldError, match=r"prompt\[1\] holds 4294967296; allowed are at most 4294967295"):
        parse(CompletionRequest, b'{"prompt": [[4294967295], [1, 4294967296]]}').prompts()


@pytest.mark.parametrize("kind", KINDS)
@given(body=st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=60, deadline=None)
def test_any_bytes(kind: type[Fields], body: bytes) -> None:
    assert status_of(kind, body) in (200, 400)
