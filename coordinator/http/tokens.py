"""POST /tokenize and /detokenize, as vLLM's."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.front_door import FrontDoor
from coordinator.http.body import Entries, Fields, read_fields
from coordinator.http.chat_request import chat_end, check_special_tokens
from coordinator.http.errors import FieldError
from coordinator.http.logprobs import TokenWriter
from coordinator.http.messages import chat_messages
from coordinator.http.refused import TOKENIZE, RefusedFields
from kvrelay.inference import ChatPrompt, TextPrompt


class TokenizeRequest(Fields):
    refused: ClassVar[RefusedFields] = TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: Entries[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def to_prompt(self) -> TextPrompt | ChatPrompt:
        """Raises FieldError."""
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("a text in prompt or a chat in messages is needed, and not both", "prompt")
        if self.prompt is not None:
            return TextPrompt(self.prompt, add_bos=self.add_special_tokens is not False)
        check_special_tokens(self.add_special_tokens)
        kwargs = json.dumps(self.chat_template_kwargs) if self.chat_template_kwargs else ""
        end = chat_end(self.add_generation_prompt, self.continue_final_message)
        return ChatPrompt(chat_messages(self.messages or []), template_kwargs=kwargs, end=end)


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: Entries[int]


class Tokenizing:
    def __init__(self, door: FrontDoor) -> None:
        self._door = door

    async def tokenize(self, request: Request) -> Response:
        wanted = await read_fields(request, TokenizeRequest)
        served = self._door.models.find(wanted.model or "")
        tokenizer = served.text.tokenizer
        token_ids = await served.text.prompt_ids(wanted.to_prompt(), tokenizer.vocab_size)
        writer = TokenWriter(tokenizer)
        return JSONResponse(
            {
                "count": len(token_ids),
                "max_model_len": served.info.max_model_len,
                "tokens": list(token_ids),
                "token_strs": [writer.text(one) for one in token_ids] if wanted.return_token_strs else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        wanted = await read_fields(request, DetokenizeRequest)
        served = self._door.models.find(wanted.model or "")
        return JSONResponse({"prompt": served.text.decode(wanted.tokens, served.info.vocab_size)})
