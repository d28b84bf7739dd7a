"""What answers are held to, under the names that OpenAI's and vLLM's clients use for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from coordinator.http.body import Entries, Fields
from coordinator.http.errors import FieldError
from coordinator.http.refused import STRUCTURED_OUTPUTS, RefusedFields
from kvrelay.structured import StructuredOutput, StructureKind


class JsonSchema(Fields):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Answers conform in either case.")


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def structure(self) -> StructuredOutput | None:
        """Raises FieldError."""
        if self.type == "json_object":
            return StructuredOutput(StructureKind.JSON_OBJECT)
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.schema_ is None:
            field = "response_format.json_schema.schema"
            raise FieldError(f"{field} is missing; it is what the answer is held to", field)
        return of_schema(self.json_schema.schema_)


class StructuredOutputs(Fields):
    refused: ClassVar[RefusedFields] = STRUCTURED_OUTPUTS

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Entries[str] | None = None
    grammar: str | None = None

    def structures(self) -> Iterator[StructuredOutput]:
        if self.json_object:
            yield StructuredOutput(StructureKind.JSON_OBJECT)
        yield from structures(self.json_, self.regex, self.choice, self.grammar)


def structures(
    schema: dict[str, Any] | str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[StructuredOutput]:
    if schema is not None:
        yield of_schema(schema)
    if regex is not None:
        yield StructuredOutput(StructureKind.REGEX, regex)
    if choice is not None:
        yield StructuredOutput(StructureKind.CHOICE, choices=tuple(choice))
    if grammar is not None:
        yield StructuredOutput(StructureKind.GRAMMAR, grammar)


def of_schema(schema: dict[str, Any] | bool | str) -> StructuredOutput:
    """A schema that is text is JSON already."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return StructuredOutput(StructureKind.JSON_SCHEMA, text)


def only_one(found: list[StructuredOutput]) -> StructuredOutput | None:
    """Raises FieldError for several."""
    if len(found) > 1:
        kinds = ", ".join(str(one.kind) for one in found)
        raise FieldError(f"the answer is to be held to several things ({kinds}); choose one", "response_format")
    return found[0] if found else None
