"""The body of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from coordinator.http.body import Entries, Fields, checked
from coordinator.http.chat_request import check_special_tokens
from coordinator.http.errors import FieldError
from coordinator.http.generation import GenerationFields
from coordinator.http.messages import FunctionCall, text_of
from coordinator.http.refused import RESPONSES, RESPONSES_ITEM, RESPONSES_TEXT, RefusedFields, shown
from coordinator.http.structure import JsonSchema, ResponseFormat
from coordinator.http.tools import ToolUse, tool_use
from kvrelay.inference import ChatMessage, ChatPrompt, ToolCall
from kvrelay.structured import StructuredOutput
from kvrelay.tool_prompt import ToolFormat

ROLES = ("system", "developer", "user", "assistant")
LOGPROBS = "message.output_text.logprobs"  # what include may ask for
MAX_ITEMS = 20_000


class TextFormat(JsonSchema):
    """As response_format of a chat, but for the object around the schema."""

    type: Literal["text", "json_object", "json_schema"]

    def structure(self) -> StructuredOutput | None:
        inner = JsonSchema.model_validate({"schema": self.schema_}) if self.type == "json_schema" else None
        return ResponseFormat(type=self.type, json_schema=inner).structure()


class TextOptions(Fields):
    refused: ClassVar[RefusedFields] = RESPONSES_TEXT

    format: TextFormat | None = None


class MessageItem(Fields):
    refused: ClassVar[RefusedFields] = RESPONSES_ITEM

    type: Literal["message"] = "message"
    role: str
    content: str | Entries[dict[str, Any]]
    id: str | None = None
    status: str | None = None


class CallItem(FunctionCall):
    refused: ClassVar[RefusedFields] = RESPONSES_ITEM

    type: Literal["function_call"]
    call_id: str
    id: str | None = None
    status: str | None = None


class ResultItem(Fields):
    refused: ClassVar[RefusedFields] = RESPONSES_ITEM

    type: Literal["function_call_output"]
    call_id: str
    output: str | Entries[dict[str, Any]]
    id: str | None = None
    status: str | None = None


class ResponsesRequest(GenerationFields):
    refused: ClassVar[RefusedFields] = RESPONSES

    input: Annotated[str | Entries[dict[str, Any]], WithJsonSchema({"type": ["string", "array"]})]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    include: Entries[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = Field(None, description="0 to 20, with message.output_text.logprobs in include.")
    tools: Entries[dict[str, Any]] | None = None
    tool_choice: Annotated[Any, WithJsonSchema({})] = None
    parallel_tool_calls: bool | None = None

    def tool_use(self, form: ToolFormat) -> ToolUse:
        """Raises FieldError."""
        tools = [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools or [])]
        return tool_use(tools, _chat_choice(self.tool_choice), form, parallel=self.parallel_tool_calls is not False)

    def structure(self) -> StructuredOutput | None:
        """Raises FieldError."""
        formatted = self.text.format.structure() if self.text is not None and self.text.format is not None else None
        other = super().structure()
        if formatted is not None and other is not None:
            raise FieldError("text.format and another field say what the answer is held to; choose one", "text.format")
        return formatted or other

    def text_format_body(self) -> dict[str, Any]:
        """As the reply says it again."""
        if self.text is None or self.text.format is None:
            return {"type": "text"}
        return self.text.format.model_dump(by_alias=True, exclude_none=True)

    def prompt(self, tools: str) -> ChatPrompt:
        """Raises FieldError."""
        check_special_tokens(self.add_special_tokens)
        told = [ChatMessage("system", self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return ChatPrompt((*told, ChatMessage("user", self.input)), tools)
        if not 1 <= len(self.input) <= MAX_ITEMS:
            raise FieldError(f"input has {len(self.input)} entries; allowed is [1, {MAX_ITEMS}]", "input")
        items = [_message(item, f"input[{index}]") for index, item in enumerate(self.input)]
        return ChatPrompt((*told, *_joined(items)), tools)

    def num_logprobs(self) -> int | None:
        """As SamplingParams.logprobs. Raises FieldError."""
        if LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise FieldError(f"top_logprobs is {self.top_logprobs}, but include lacks {LOGPROBS!r}", "top_logprobs")
        return None


def _message(item: dict[str, Any], where: str) -> ChatMessage:
    kind = item.get("type", "message")
    if kind == "function_call":
        call = checked(CallItem, item, f"{where}.")
        return ChatMessage("assistant", "", (ToolCall(call.call_id, call.name, call.arguments),))
    if kind == "function_call_output":
        result = checked(ResultItem, item, f"{where}.")
        return ChatMessage("tool", text_of(result.output, f"{where}.output"), tool_call_id=result.call_id)
    if kind != "message":
        allowed = "message, function_call and function_call_output"
        raise FieldError(f"{where}.type is {shown(kind)}; allowed are {allowed}", f"{where}.type")
    message = checked(MessageItem, item, f"{where}.")
    if message.role not in ROLES:
        raise FieldError(f"{where}.role is {shown(message.role)}; allowed are {', '.join(ROLES)}", f"{where}.role")
    return ChatMessage(message.role, text_of(message.content, f"{where}.content"))


def _joined(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Calls belong to the turn that said something before them."""
    turns: list[ChatMessage] = []
    for message in messages:
        last = turns[-1] if turns else None
        if message.tool_calls and last is not None and last.role == "assistant":
            turns[-1] = ChatMessage("assistant", last.content, (*last.tool_calls, *message.tool_calls))
        else:
            turns.append(message)
    return turns


def _chat_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """As chats write it. Raises FieldError for a tool that is no function."""
    if tool.get("type") != "function":
        raise FieldError(f"{where}.type is {shown(tool.get('type'))}; allowed is function", f"{where}.type")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _chat_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {key: value for key, value in choice.items() if key != "type"}}
    return choice
