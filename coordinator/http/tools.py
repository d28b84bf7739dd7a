"""Tools that a request offers, and whether the answer has to call one of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from coordinator.http.body import Fields, checked
from coordinator.http.errors import FieldError
from coordinator.http.refused import shown
from coordinator.http.structure import of_schema
from coordinator.http.tool_calls import ArgumentsReader, JsonReader, MakeReader, PlainReader, reader_of
from kvrelay.sampling import SamplingParams
from kvrelay.structured import StructuredOutput
from kvrelay.tool_prompt import ToolFormat

MAX_TOOLS = 128
_DEFINITIONS = ("$defs", "definitions")


class Function(Fields):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return self.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(Fields):
    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    name: str


class NamedChoice(Fields):
    type: Literal["function"] = "function"
    function: NamedFunction


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`offered` is told to the model, as JSON text; empty: nothing. `structure` is what the answer is held to."""

    offered: str
    structure: StructuredOutput | None
    make_reader: MakeReader

    def hold(self, sampling: SamplingParams) -> SamplingParams:
        """As `sampling`, with the answer held to the call that is asked for. Raises FieldError where it is to be held
        to something else too."""
        if self.structure is None:
            return sampling
        if sampling.structured is not None:
            raise FieldError(
                "tool_choice asks for a call, and the answer is to be held to something else too; choose one",
                "tool_choice",
            )
        return replace(sampling, structured=self.structure)


NO_TOOLS = ToolUse("", None, PlainReader)


def tool_use(tools: list[dict[str, Any]] | None, choice: Any, form: ToolFormat, *, parallel: bool = True) -> ToolUse:
    """What becomes of a request's tools and tool_choice. Raises FieldError."""
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools or [])]
    if len(functions) > MAX_TOOLS:
        raise FieldError(f"tools has {len(functions)} entries; at most {MAX_TOOLS} are allowed", "tools")
    named = _named(choice, functions)
    if not functions or choice == "none":
        return NO_TOOLS
    offered = json.dumps(tools, ensure_ascii=False)
    most_calls = None if parallel else 1
    names = frozenset(function.name for function in functions)
    if named is not None:
        return ToolUse(offered, of_schema(named.schema_of_arguments), partial(ArgumentsReader, named.name))
    if choice == "required":
        return ToolUse(offered, _any_call(functions, most_calls), partial(JsonReader, names, most_calls))
    return ToolUse(offered, None, partial(reader_of, form, names, most_calls))


def _function(tool: dict[str, Any], where: str) -> Function:
    return checked(Tool, tool, f"{where}.").function


def _named(choice: Any, functions: list[Function]) -> Function | None:
    """The function that has to be called. Raises FieldError for a choice that is none, or has no tool to choose."""
    if choice is None or choice in ("none", "auto"):
        return None
    if not functions:
        raise FieldError(f"tool_choice is {shown(choice)}, but there are no tools", "tool_choice")
    if choice == "required":
        return None
    if not isinstance(choice, dict):
        allowed = "none, auto, required or a function by its name"
        raise FieldError(f"tool_choice is {shown(choice)}; allowed is {allowed}", "tool_choice")
    name = checked(NamedChoice, choice, "tool_choice.").function.name
    for function in functions:
        if function.name == name:
            return function
    raise FieldError(f"tool_choice names {shown(name)}, which is none of the tools", "tool_choice.function.name")


def _any_call(functions: list[Function], most_calls: int | None) -> StructuredOutput:
    """An array of calls, at least one. Schemas' definitions move to the top, where their references look for them."""
    definitions: dict[str, dict[str, Any]] = {}
    calls = [_call_schema(function, definitions) for function in functions]
    array = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **definitions}
    return of_schema(array if most_calls is None else {**array, "maxItems": most_calls})


def _call_schema(function: Function, definitions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    schema = dict(function.schema_of_arguments)
    for key in _DEFINITIONS:
        own = schema.pop(key, {})
        if not isinstance(own, dict):
            raise FieldError(f"{key} of the tool {shown(function.name)} is {shown(own)}; allowed is an object", "tools")
        for name, definition in own.items():
            known = definitions.setdefault(key, {}).setdefault(name, definition)
            if known != definition:
                raise FieldError(f"two tools define {shown(name)} in their {key}, and not alike", "tools")
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "parameters": schema},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
