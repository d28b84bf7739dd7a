"""A chat's messages, from what clients send to what templates are given."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from coordinator.http.body import Entries, Fields, checked
from coordinator.http.errors import FieldError
from coordinator.http.refused import MESSAGE, RefusedFields, shown
from coordinator.text import CHAT_ROLES
from kvrelay.inference import ChatMessage, ToolCall

MAX_MESSAGES = 20_000
MESSAGES = {"type": "array", "items": {"$ref": "#/components/schemas/Message"}, "minItems": 1}  # as OpenAPI says it
TEXT_PARTS = ("text", "input_text", "output_text")  # as chats, and as responses call them


class FunctionCall(Fields):
    name: str
    arguments: str


class MessageToolCall(Fields):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Fields):
    refused: ClassVar[RefusedFields] = MESSAGE

    role: str
    content: str | Entries[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: Entries[MessageToolCall] | None = None
    tool_call_id: str | None = None


def chat_messages(messages: list[dict[str, Any]]) -> tuple[ChatMessage, ...]:
    """Raises FieldError, naming the message."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise FieldError(f"messages has {len(messages)} entries; allowed is [1, {MAX_MESSAGES}]", "messages")
    return tuple(_chat_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def _chat_message(wanted: dict[str, Any], where: str) -> ChatMessage:
    message = checked(Message, wanted, f"{where}.")
    if message.role not in CHAT_ROLES:
        field = f"{where}.role"
        raise FieldError(f"{field} is {shown(message.role)}; allowed are {', '.join(CHAT_ROLES)}", field)
    if message.tool_calls and message.role != "assistant":
        field = f"{where}.tool_calls"
        raise FieldError(f"{field} is there, but the role is {message.role}; only an assistant calls tools", field)
    calls = [ToolCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    content = text_of(message.content, f"{where}.content")
    return ChatMessage(message.role, content, tuple(calls), message.tool_call_id or "", message.name or "")


def text_of(content: str | Entries[dict[str, Any]] | None, where: str) -> str:
    """Parts stand on lines of their own, as in vLLM. Raises FieldError for one that is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_text_of_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _text_of_part(part: dict[str, Any], where: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind not in TEXT_PARTS:
        raise FieldError(f"{where} is a part of type {shown(kind)}; allowed is text", where)
    if not isinstance(text, str):
        raise FieldError(f"{where}.text is {shown(text)}; allowed is a string", f"{where}.text")
    return text
