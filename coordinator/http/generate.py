"""POST /v1/chat/completions, /v1/completions and /v1/responses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from coordinator.front_door import Answering, FrontDoor
from coordinator.http import chat_shape, completion_shape
from coordinator.http.answers import Answers
from coordinator.http.body import read_fields
from coordinator.http.callers import caller_of
from coordinator.http.chat_request import ChatRequest
from coordinator.http.chat_shape import ChatShape
from coordinator.http.completion_request import CompletionRequest
from coordinator.http.completion_shape import CompletionShape
from coordinator.http.generation import ChoicesFields, GenerationFields
from coordinator.http.logprobs import TokenWriter
from coordinator.http.reply import ChoicesReply, Head
from coordinator.http.request_id import request_id_of
from coordinator.http.respond import respond
from coordinator.http.responses_reply import ResponsesReply
from coordinator.http.responses_request import ResponsesRequest
from coordinator.identity import Identity
from coordinator.served_models import ServedModel
from kvrelay.inference import GenerateRequest, TextPrompt, TokenPrompt

FINGERPRINT_CHARS = 12


class Generating:
    def __init__(self, door: FrontDoor) -> None:
        self._door = door

    async def chat(self, request: Request) -> Response:
        wanted = await read_fields(request, ChatRequest)
        wanted.check_stream_options()
        request_id = request_id_of(request, wanted.request_id)
        num_logprobs = wanted.num_logprobs()
        served = self._door.models.find(wanted.model or "")
        use = wanted.tool_use(served.text.tokenizer.tool_format)
        sampling = use.hold(wanted.sampling(wanted.most_tokens(), num_logprobs))
        asked = [wanted.to_request(wanted.prompt(use.offered), sampling, request_id)]
        shape = ChatShape(_writer(served, wanted) if wanted.logprobs else None, use.make_reader)
        head = _head(served, wanted, f"chatcmpl-{request_id}")
        answers = await self._ask(asked, caller_of(request), wanted)
        reply = ChoicesReply(answers, shape, head, chat_shape.KIND, chat_shape.CHUNK_KIND, **_usage_options(wanted))
        return await respond(request, reply, stream=bool(wanted.stream))

    async def complete(self, request: Request) -> Response:
        wanted = await read_fields(request, CompletionRequest)
        wanted.check_stream_options()
        wanted.check_echo()
        request_id = request_id_of(request, wanted.request_id)
        sampling = wanted.sampling(wanted.most_tokens, wanted.logprobs)
        served = self._door.models.find(wanted.model or "")
        prompts = wanted.prompts()
        ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{number}" for number in range(len(prompts))]
        asked = [wanted.to_request(*of_one) for of_one in zip(prompts, [sampling] * len(ids), ids, strict=True)]
        echoes = [_echo(served, prompt) if wanted.echo else "" for prompt in prompts for _ in range(wanted.num_choices)]
        shape = CompletionShape(_writer(served, wanted) if wanted.logprobs is not None else None, echoes)
        head = _head(served, wanted, f"cmpl-{request_id}")
        answers = await self._ask(asked, caller_of(request), wanted)
        kind = completion_shape.KIND
        reply = ChoicesReply(answers, shape, head, kind, kind, **_usage_options(wanted))
        return await respond(request, reply, stream=bool(wanted.stream))

    async def respond(self, request: Request) -> Response:
        wanted = await read_fields(request, ResponsesRequest)
        request_id = request_id_of(request, wanted.request_id)
        served = self._door.models.find(wanted.model or "")
        use = wanted.tool_use(served.text.tokenizer.tool_format)
        sampling = use.hold(wanted.sampling(wanted.max_output_tokens, wanted.num_logprobs()))
        asked = [wanted.to_request(wanted.prompt(use.offered), sampling, request_id)]
        body = _response_body(wanted, served.name, f"resp_{request_id}")
        writer = None if sampling.logprobs is None else _writer(served, wanted)
        answers = await self._ask(asked, caller_of(request), wanted)
        reply = ResponsesReply(answers, body, use.make_reader(), writer)
        return await respond(request, reply, stream=bool(wanted.stream))

    async def _ask(self, asked: Sequence[GenerateRequest], caller: Identity, wanted: GenerationFields) -> Answers:
        """All of them or none. Raises KVRelayError."""
        accepted: list[Answering] = []
        try:
            for one in asked:
                accepted.append(await self._door.accept(one, caller))
        except BaseException:
            for answering in accepted:
                answering.left()
            raise
        return Answers(accepted, wanted.num_choices, shows_stop=bool(wanted.include_stop_str_in_output))


def _writer(served: ServedModel, wanted: GenerationFields) -> TokenWriter:
    return TokenWriter(served.text.tokenizer, as_ids=bool(wanted.return_tokens_as_token_ids))


def _head(served: ServedModel, wanted: GenerationFields, reply_id: str) -> Head:
    tier = "default" if wanted.service_tier == "auto" else wanted.service_tier
    fingerprint = f"fp_{served.info.fingerprint[:FINGERPRINT_CHARS]}"
    return Head(reply_id, int(time.time()), served.name, fingerprint, tier)


def _response_body(wanted: ResponsesRequest, model: str, response_id: str) -> dict[str, Any]:
    """What a response says of its request, the usual where nothing was said."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "instructions": wanted.instructions,
        "max_output_tokens": wanted.max_output_tokens,
        "metadata": wanted.metadata or {},
        "parallel_tool_calls": wanted.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default" if wanted.service_tier in (None, "auto") else wanted.service_tier,
        "store": False,
        "temperature": 1.0 if wanted.temperature is None else wanted.temperature,
        "text": {"format": wanted.text_format_body()},
        "tool_choice": wanted.tool_choice or "auto",
        "tools": wanted.tools or [],
        "top_logprobs": wanted.top_logprobs or 0,
        "top_p": 1.0 if wanted.top_p is None else wanted.top_p,
        "truncation": "disabled",
        "user": wanted.user,
    }


def _usage_options(wanted: ChoicesFields) -> dict[str, bool]:
    return {"include_usage": wanted.include_usage, "continuous_usage": wanted.continuous_usage}


def _echo(served: ServedModel, prompt: TextPrompt | TokenPrompt) -> str:
    return prompt.text if isinstance(prompt, TextPrompt) else served.text.tokenizer.decode(prompt.token_ids)
