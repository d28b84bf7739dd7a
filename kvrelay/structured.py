"""What an answer is held to: a JSON schema, any JSON object, a regular expression, one of several texts, a grammar."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvrelay.errors import InvalidRequestError

MAX_STRUCTURE_BYTES = 131_072  # of the text, or of all choices together, as UTF-8
MAX_GRAMMAR_BYTES = 32_768
MAX_REGEX_BYTES = 16_384  # compiling takes time and memory with the square of it
MAX_CHOICES = 1_024


class StructureKind(StrEnum):
    """Values are the names of the proto's fields."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


_MAX_BYTES = {StructureKind.GRAMMAR: MAX_GRAMMAR_BYTES, StructureKind.REGEX: MAX_REGEX_BYTES}


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The whole answer conforms to it, unless it is cut at max_tokens or by a stop string.

    `text` is the schema as JSON, the regular expression, or the grammar in Lark's notation or GBNF; empty for
    JSON_OBJECT and CHOICE. `choices` are the texts that CHOICE allows, and empty for every other kind.
    """

    kind: StructureKind
    text: str = ""
    choices: tuple[str, ...] = ()

    def validate(self) -> None:
        """Sizes only; whether it can be compiled takes longer to say. Raises InvalidRequestError."""
        if self.kind is StructureKind.CHOICE:
            self._check_choices()
        elif self.kind is not StructureKind.JSON_OBJECT:
            self._check_text()
        if self.text and self.kind in (StructureKind.CHOICE, StructureKind.JSON_OBJECT):
            raise InvalidRequestError(f"structured output of kind {self.kind} takes no text; leave it out")
        if self.choices and self.kind is not StructureKind.CHOICE:
            raise InvalidRequestError(f"structured output of kind {self.kind} takes no choices; leave them out")

    def _check_text(self) -> None:
        if not self.text:
            raise InvalidRequestError(f"{self.kind} is empty; write one, or leave it out")
        _check_bytes(self.kind, self.text, _MAX_BYTES.get(self.kind, MAX_STRUCTURE_BYTES))

    def _check_choices(self) -> None:
        if not 1 <= len(self.choices) <= MAX_CHOICES:
            raise InvalidRequestError(f"choice has {len(self.choices)} entries; allowed is [1, {MAX_CHOICES}]")
        if "" in self.choices:
            raise InvalidRequestError("choice holds an empty string; every choice needs some text")
        _check_bytes(self.kind, "".join(self.choices))


def _check_bytes(name: str, text: str, most: int = MAX_STRUCTURE_BYTES) -> None:
    try:
        num_bytes = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{name} is not valid Unicode: {error.reason} at {error.start}") from error
    if num_bytes > most:
        raise InvalidRequestError(f"{name} has {num_bytes} bytes; at most {most} are allowed")
