"""How tools are told to a model whose chat template has no place for them, and how it is to call them. Pure.

The form is the one that most open models were trained on (Hermes): JSON between tags.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from kvrelay.inference import ChatMessage, ChatPrompt

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
_LLAMA_MARK = '"parameters"'  # in the words of Llama's template that say how to call

_TOLD = """You may call functions. Here they are, one on a line:
<tools>
{tools}
</tools>
To call one, write its name and arguments as a JSON object between tags, and nothing after it:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>"""


class ToolFormat(Enum):
    """How a model writes that it calls a tool."""

    HERMES = "hermes"  # JSON with name and arguments, each call between CALL_BEGIN and CALL_END
    LLAMA3 = "llama3"  # the whole answer is JSON with name and parameters, of several calls with semicolons between


def tool_format_of(template: str) -> ToolFormat:
    """By what the chat template's source tells the model; HERMES where it tells nothing."""
    is_llama = _LLAMA_MARK in template and CALL_BEGIN not in template
    return ToolFormat.LLAMA3 if is_llama else ToolFormat.HERMES


def as_plain_turns(chat: ChatPrompt, tools: Sequence[Any]) -> ChatPrompt:
    """The same chat for a template that knows system, user and assistant only."""
    messages = [_plain(message) for message in chat.messages]
    if tools:
        told = _TOLD.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if messages[0].role in ("system", "developer"):
            told = f"{messages[0].content}\n\n{told}"
            messages = messages[1:]
        messages = [ChatMessage("system", told), *messages]
    return replace(chat, messages=tuple(messages), tools="")


def _plain(message: ChatMessage) -> ChatMessage:
    if message.role == "tool":
        return ChatMessage("user", f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = [
        f'{CALL_BEGIN}\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}\n{CALL_END}'
        for call in message.tool_calls
    ]
    return ChatMessage(message.role, "\n".join([*([message.content] if message.content else []), *calls]))
