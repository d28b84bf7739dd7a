"""Calls of tools are read from answers, whole or in pieces of any size, and what is no call stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.http.call_object import ArgumentsGrew, CallBegan, Said
from coordinator.http.errors import FieldError
from coordinator.http.tool_calls import ArgumentsReader, HermesReader, JsonReader, MakeReader
from coordinator.http.tools import tool_use
from kvrelay.tool_prompt import ToolFormat

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "a \\"b\\" } ]", "n": [1, {"x": 2}]}}\n</tool_call>'
ARGUMENTS = '{"at": "a \\"b\\" } ]", "n": [1, {"x": 2}]}'
NAMES = frozenset(("look", "go"))

Read = tuple[str, list[tuple[str, str]]]  # text, and calls as name and arguments


def read(make_reader: MakeReader, parts: Iterable[str]) -> Read:
    reader = make_reader()
    pieces = [piece for part in parts for piece in reader.push(part)] + reader.end()
    text, names, arguments = "", [], []
    for piece in pieces:
        match piece:
            case Said(more):
                text += more
            case CallBegan(index, call_id, name):
                assert index == len(names)
                assert re.fullmatch("call_[0-9a-f]{24}", call_id)
                names.append(name)
                arguments.append("")
            case ArgumentsGrew(index, more):
                assert more
                arguments[index] += more
    return text, list(zip(names, arguments, strict=True))


HERMES: list[tuple[str, Read]] = [
    ("plain text", ("plain text", [])),
    ("ends in blanks \n", ("ends in blanks \n", [])),
    ("1 < 2 <tool", ("1 < 2 <tool", [])),
    (CALL, ("", [("look", ARGUMENTS)])),
    (f"I look. \n{CALL}\n{CALL}\n", ("I look.", [("look", ARGUMENTS)] * 2)),
    ('<tool_call>{"arguments": {"a": 1}, "name": "look"}</tool_call>', ("", [("look", '{"a": 1}')])),
    ('<tool_call>{"name": "look", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("look", '{"a": 1}')])),
    ('<tool_call>{"name": "look"}</tool_call>', ("", [("look", "{}")])),
    ('<tool_call>{"name": "look", "arguments": {"a": "</tool_call>"}}</tool_call>.',
     (".", [("look", '{"a": "</tool_call>"}')])),
    ("<tool_call>no call</tool_call> at all", ("<tool_call>no call</tool_call> at all", [])),
    ("<tool_call>cut off", ("<tool_call>cut off", [])),
    ('<tool_call>{"name": "look", "arguments": {"a": 1', ("", [("look", '{"a": 1')])),
]  # fmt: skip

LLAMA: list[tuple[str, Read]] = [
    ("plain text", ("plain text", [])),
    ('{"name": "look", "parameters": {"a": 1}}', ("", [("look", '{"a": 1}')])),
    ('{"name": "look", "parameters": {"a": 1}}; {"name": "go", "parameters": {}}',
     ("", [("look", '{"a": 1}'), ("go", "{}")])),
    ('[{"name": "look", "parameters": {"a": 1}}, {"name": "go", "parameters": {}}]',
     ("", [("look", '{"a": 1}'), ("go", "{}")])),
    ('{"parameters": {"a": 1}, "name": "go"}', ("", [("go", '{"a": 1}')])),
    ('{"name": "Anna", "parameters": {"a": 1}}', ('{"name": "Anna", "parameters": {"a": 1}}', [])),
    ('{"colour": "red"}', ('{"colour": "red"}', [])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), HERMES)
def test_calls_between_tags(text: str, expected: Read) -> None:
    assert read(HermesReader, [text]) == expected
    assert read(HermesReader, text) == expected


@pytest.mark.parametrize(("text", "expected"), LLAMA)
def test_calls_that_are_the_whole_answer(text: str, expected: Read) -> None:
    assert read(lambda: JsonReader(NAMES), [text]) == expected
    assert read(lambda: JsonReader(NAMES), text) == expected


@given(st.sampled_from(HERMES), st.lists(st.integers(1, 9), min_size=1))
def test_it_does_not_matter_how_the_text_is_cut(case: tuple[str, Read], sizes: list[int]) -> None:
    text, expected = case
    parts, start = [], 0
    while start < len(text):
        size = sizes[len(parts) % len(sizes)]
        parts.append(text[start : start + size])
        start += size
    assert read(HermesReader, parts) == expected


@pytest.mark.parametrize(
    "written",
    [
        r'{"name": "\x", "arguments": {}}',
        '{"name": "lo\nok", "arguments": {}}',
        r'{"name": "\ud83d", "arguments": {}}',
        r'{"arguments": {"at": "\ud83d"}, "name": "look"}',
    ],
)
def test_a_call_that_is_no_json_or_holds_half_a_character_is_text(written: str) -> None:
    assert read(HermesReader, [f"<tool_call>{written}</tool_call>"]) == (f"<tool_call>{written}</tool_call>", [])
    assert read(lambda: JsonReader(NAMES), [written]) == (written, [])


def test_a_name_may_be_written_with_escapes() -> None:
    written = r'{"name": "l\u006fok", "arguments": {"at": 1}}'
    assert read(lambda: JsonReader(NAMES), [written]) == ("", [("look", '{"at": 1}')])


def test_arguments_are_told_before_they_are_complete() -> None:
    reader = HermesReader()
    assert reader.push("Well: <tool_") == [Said("Well:")]
    began, grown = reader.push('call>{"name": "look", "arguments": {"a')
    assert isinstance(began, CallBegan)
    assert grown == ArgumentsGrew(0, '{"a')


def test_a_name_longer_than_any_tools_is_looked_for_once_when_the_call_is_complete() -> None:
    """Each token would else be as much work as all before it."""
    name = "look" * 250
    for reader, end in ((HermesReader(), "</tool_call>"), (JsonReader(frozenset([name])), "")):
        begin = "<tool_call>" if end else ""
        assert reader.push(f'{begin}{{"name": "{name}", "arguments": {{"a": 1') == []
        began, grown = reader.push("}}" + end) + reader.end()
        assert isinstance(began, CallBegan)
        assert (began.name, grown) == (name, ArgumentsGrew(0, '{"a": 1}'))


def test_calls_after_the_most_are_not_told() -> None:
    assert read(lambda: HermesReader(1), [f"{CALL}\n{CALL}"]) == ("", [("look", ARGUMENTS)])


def test_a_named_tools_answer_is_its_arguments() -> None:
    assert read(lambda: ArgumentsReader("look"), ["", '{"a"', ": 1}"]) == ("", [("look", '{"a": 1}')])


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or None}}


def test_an_answer_that_has_to_call_is_held_to_an_array_of_calls() -> None:
    defined = {"$defs": {"N": {"type": "integer"}}}
    tools = [
        tool("look", type="object", properties={"n": {"$ref": "#/$defs/N"}}, **defined),
        tool("go"),
    ]
    use = tool_use(tools, "required", ToolFormat.HERMES, parallel=False)
    assert use.structure is not None
    schema = json.loads(use.structure.text)
    assert schema["$defs"] == defined["$defs"]
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    look, go = schema["items"]["anyOf"]
    assert look == {
        "type": "object",
        "properties": {
            "name": {"const": "look"},
            "parameters": {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}},
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    assert go["properties"]["parameters"] == {"type": "object", "properties": {}, "additionalProperties": False}


def test_a_named_tools_answer_is_held_to_its_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    use = tool_use([tool("look", **schema)], {"type": "function", "function": {"name": "look"}}, ToolFormat.LLAMA3)
    assert use.structure is not None
    assert json.loads(use.structure.text) == schema


def test_without_tools_or_with_none_wanted_nothing_is_told_and_nothing_read() -> None:
    for tools, choice in ((None, None), ([], "auto"), ([tool("look")], "none")):
        use = tool_use(tools, choice, ToolFormat.HERMES)
        assert (use.offered, use.structure) == ("", None)
        assert read(use.make_reader, [CALL]) == (CALL, [])


@pytest.mark.parametrize(
    ("tools", "choice", "field", "words"),
    [
        ([{"type": "retrieval"}], None, "tools[0].type", "tools[0].type is 'retrieval'"),
        ([{"type": "function", "function": {}}], None, "tools[0].function.name", "is missing"),
        ([tool("look")] * 129, None, "tools", "tools has 129 entries; at most 128 are allowed"),
        ([], "required", "tool_choice", "tool_choice is 'required', but there are no tools"),
        ([tool("look")], "any", "tool_choice", "allowed is none, auto, required or a function"),
        ([tool("look")], {"type": "function", "function": {"name": "go"}}, "tool_choice.function.name", "none of the"),
        ([tool("a", **{"$defs": [1]})], "required", "tools", "$defs of the tool 'a' is [1]; allowed is an object"),
        ([tool("a", type="object", **{"$defs": {"N": {"type": "integer"}}}),
          tool("b", type="object", **{"$defs": {"N": {"type": "string"}}})],
         "required", "tools", "two tools define 'N' in their $defs, and not alike"),
    ],
)  # fmt: skip
def test_what_is_no_choice_of_tools_is_refused(tools: Any, choice: Any, field: str, words: str) -> None:
    with pytest.raises(FieldError) as caught:
        tool_use(tools, choice, ToolFormat.HERMES)
    assert caught.value.field == field
    assert words in caught.value.message
