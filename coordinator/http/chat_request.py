"""The body of POST /v1/chat/completions."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from coordinator.http.body import Entries
from coordinator.http.errors import FieldError
from coordinator.http.generation import ChoicesFields
from coordinator.http.messages import MESSAGES, chat_messages
from coordinator.http.refused import CHAT, RefusedFields
from coordinator.http.tools import ToolUse, tool_use
from kvrelay.inference import ChatEnd, ChatPrompt
from kvrelay.tool_prompt import ToolFormat

_TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            },
            "required": ["type", "function"],
            "additionalProperties": False,
        },
    ]
}


class ChatRequest(ChoicesFields):
    refused: ClassVar[RefusedFields] = CHAT

    messages: Annotated[Entries[dict[str, Any]], WithJsonSchema(MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description="0 to 20; needs logprobs.")
    tools: Entries[dict[str, Any]] | None = None
    tool_choice: Annotated[Any, WithJsonSchema(_TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = Field(None, description="false: calls after the first are not told.")
    # vLLM's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def tool_use(self, form: ToolFormat) -> ToolUse:
        """Raises FieldError."""
        return tool_use(self.tools, self.tool_choice, form, parallel=self.parallel_tool_calls is not False)

    def prompt(self, tools: str = "") -> ChatPrompt:
        """`tools` is what the model is told of them. Raises FieldError."""
        check_special_tokens(self.add_special_tokens)
        kwargs = json.dumps(self.chat_template_kwargs) if self.chat_template_kwargs else ""
        end = chat_end(self.add_generation_prompt, self.continue_final_message)
        return ChatPrompt(chat_messages(self.messages), tools, template_kwargs=kwargs, end=end)

    def most_tokens(self) -> int | None:
        """Raises FieldError where the old name and the new one say different things."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise FieldError(
                f"max_tokens is {old} and max_completion_tokens {new}; send one of them, or the same", "max_tokens"
            )
        return old if new is None else new

    def num_logprobs(self) -> int | None:
        """As SamplingParams.logprobs. Raises FieldError."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise FieldError(f"top_logprobs is {self.top_logprobs}, but logprobs is not true", "top_logprobs")
        return None


def check_special_tokens(are_added: bool | None) -> None:
    """Of a chat. Raises FieldError."""
    if are_added:
        raise FieldError(
            "add_special_tokens is true; a chat template writes the special tokens itself", "add_special_tokens"
        )


def chat_end(add_generation_prompt: bool | None, continue_final_message: bool | None) -> ChatEnd:
    """Raises FieldError."""
    if continue_final_message:
        if add_generation_prompt:
            raise FieldError(
                "add_generation_prompt and continue_final_message are both true; choose one", "continue_final_message"
            )
        return ChatEnd.LAST_MESSAGE
    return ChatEnd.NOTHING if add_generation_prompt is False else ChatEnd.ANSWER
