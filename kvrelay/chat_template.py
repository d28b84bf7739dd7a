"""A model's chat template: messages in, prompt text out.

Templates come with model files, so they are foreign code: they run in jinja2's immutable sandbox, with the same
settings and names that Hugging Face's templates are written for.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrelay.errors import InvalidRequestError, ModelFileError
from kvrelay.inference import ChatEnd, ChatMessage, ChatPrompt, ToolCall
from kvrelay.tool_prompt import as_plain_turns, tool_format_of

_OWN_NAMES = frozenset(("messages", "tools", "add_generation_prompt", "bos_token", "eos_token"))


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
        self.tool_format = tool_format_of(source)
        self._takes_tools = "tools" in source
        self._knows_developers = "developer" in source

    def render(self, chat: ChatPrompt) -> str:
        """The prompt, up to what `chat.end` says. A developer's turn is a system's where the template knows no
        developer, and where it knows no tools they are told in words.

        Raises InvalidRequestError, with the template's own words when it refuses the messages.
        """
        if not chat.messages:
            raise InvalidRequestError("the chat has no messages; at least one is needed")
        tools = _json_of("tools", chat.tools, list) if chat.tools else None
        if not self._takes_tools:
            chat, tools = as_plain_turns(chat, tools or ()), None
        names: dict[str, Any] = {
            **_template_kwargs(chat),
            "messages": [self._turn(message) for message in chat.messages],
            "tools": tools,
            "add_generation_prompt": chat.end is ChatEnd.ANSWER,
        }
        try:
            text = self._template.render(**names, **self._tokens)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"the model's chat template refused the messages: {error}") from error
        return _left_open(text, chat.messages[-1]) if chat.end is ChatEnd.LAST_MESSAGE else text

    def _turn(self, message: ChatMessage) -> dict[str, Any]:
        """With no more keys than the message has: templates ask which are there."""
        role = "system" if message.role == "developer" and not self._knows_developers else message.role
        turn: dict[str, Any] = {"role": role, "content": message.content}
        if message.tool_calls:
            turn["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
        if message.tool_call_id:
            turn["tool_call_id"] = message.tool_call_id
        if message.name:
            turn["name"] = message.name
        return turn


def _tool_call(call: ToolCall) -> dict[str, Any]:
    """Templates are written for arguments that are an object."""
    arguments = _json_of(f"the arguments of tool call {call.call_id[:64]!r}", call.arguments or "{}", dict)
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _template_kwargs(chat: ChatPrompt) -> dict[str, Any]:
    if not chat.template_kwargs:
        return {}
    kwargs: dict[str, Any] = _json_of("chat_template_kwargs", chat.template_kwargs, dict)
    if taken := _OWN_NAMES & kwargs.keys():
        raise InvalidRequestError(f"chat_template_kwargs has {sorted(taken)[0]!r}, which the request itself says")
    return kwargs


def _json_of(what: str, text: str, kind: type[list[Any]] | type[dict[str, Any]]) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{what} {text[:64]!r} is not JSON: {error}") from error
    if not isinstance(value, kind):
        raise InvalidRequestError(f"{what} is {text[:64]!r}; allowed is a JSON {'array' if kind is list else 'object'}")
    return value


def _left_open(text: str, last: ChatMessage) -> str:
    """Up to the end of what the last message says, without what the template puts after it."""
    content = last.content.strip()
    end = text.rfind(content) + len(content) if content else -1
    if end < len(content):
        raise InvalidRequestError("the last message is to be continued, but the chat template shows none of its text")
    return text[:end]


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
