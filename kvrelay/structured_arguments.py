"""What an answer is held to, on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvrelay.errors import InvalidRequestError
from kvrelay.structured import StructuredOutput, StructureKind


def add_structured_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what the answer is held to: one of these")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--json-schema", metavar="JSON", help="a JSON schema, or @FILE that holds one")
    one.add_argument("--json-object", action="store_true", help="any JSON object")
    one.add_argument("--regex", metavar="REGEX", help="a regular expression that the whole answer matches")
    one.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts; repeat it for each")
    one.add_argument("--grammar", metavar="GRAMMAR", help="a grammar in Lark's notation or GBNF, or @FILE")


def structured_of(options: argparse.Namespace) -> StructuredOutput | None:
    """What was given, None if nothing was. Raises InvalidRequestError."""
    structured = _given(options)
    if structured is not None:
        structured.validate()
    return structured


def _given(options: argparse.Namespace) -> StructuredOutput | None:
    if options.json_schema is not None:
        return StructuredOutput(StructureKind.JSON_SCHEMA, _text_or_file("--json-schema", options.json_schema))
    if options.json_object:
        return StructuredOutput(StructureKind.JSON_OBJECT)
    if options.regex is not None:
        return StructuredOutput(StructureKind.REGEX, options.regex)
    if options.choice is not None:
        return StructuredOutput(StructureKind.CHOICE, choices=tuple(options.choice))
    if options.grammar is not None:
        return StructuredOutput(StructureKind.GRAMMAR, _text_or_file("--grammar", options.grammar))
    return None


def _text_or_file(flag: str, text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text("utf-8")
    except OSError as error:
        raise InvalidRequestError(f"cannot read the file that {flag} names, {text[1:]}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the file that {flag} names, {text[1:]}, is no UTF-8 text: {error}") from error
