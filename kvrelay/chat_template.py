"""A model's chat template: messages in, prompt text out.

Templates come with model files, so they are foreign code: they run in jinja2's immutable sandbox, with the same
settings and names that Hugging Face's templates are written for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrelay.errors import InvalidRequestError, ModelFileError


class ChatMessage(Protocol):
    """One turn: who speaks ("system", "user", "assistant") and what."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; when serving, its body is plain text."""

    tags = {"generation"}  # noqa: RUF012  as the base class declares it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Any) -> str:
        text: str = caller()
        return text


class ChatTemplate:
    """Raises ModelFileError when `source` is no template; `origin` names the file in messages."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str, origin: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFileError(
                f"the chat template of {origin} does not parse: {error.message} (line {error.lineno})"
            ) from error
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt up to where the assistant's answer begins.

        Raises InvalidRequestError with the template's own words when it refuses the messages.
        """
        if not messages:
            raise InvalidRequestError("the chat has no messages; at least one is needed")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, **self._tokens)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"the model's chat template refused the messages: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # jinja2's own filter escapes HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=False, indent=indent)
