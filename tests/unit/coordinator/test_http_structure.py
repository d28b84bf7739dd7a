"""What answers are held to, however clients name it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.http.body import parse
from coordinator.http.chat_request import ChatRequest
from kvrelay.structured import StructuredOutput, StructureKind

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
BY_SCHEMA = StructuredOutput(StructureKind.JSON_SCHEMA, json.dumps(SCHEMA))
BY_REGEX = StructuredOutput(StructureKind.REGEX, "a+")
BY_CHOICE = StructuredOutput(StructureKind.CHOICE, choices=("yes", "no"))
BY_GRAMMAR = StructuredOutput(StructureKind.GRAMMAR, "root ::= x")
ANY_OBJECT = StructuredOutput(StructureKind.JSON_OBJECT)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
         BY_SCHEMA),
        ({"guided_json": SCHEMA}, BY_SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, BY_SCHEMA),
        ({"guided_regex": "a+"}, BY_REGEX),
        ({"guided_choice": ["yes", "no"]}, BY_CHOICE),
        ({"guided_grammar": "root ::= x"}, BY_GRAMMAR),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}}, BY_SCHEMA),
        ({"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}}, BY_REGEX),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, BY_CHOICE),
        ({"structured_outputs": {"grammar": "root ::= x"}}, BY_GRAMMAR),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
    ],
)  # fmt: skip
def test_each_name_holds_the_answer_to_the_same(fields: dict[str, Any], expected: StructuredOutput | None) -> None:
    request = parse(ChatRequest, json.dumps({"messages": [], **fields}).encode())
    assert request.sampling(None, None).structured == expected
