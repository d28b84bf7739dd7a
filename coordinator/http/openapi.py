"""GET /openapi.json: what may be sent to which path, made from the classes that read it."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.http.body import Fields
from coordinator.http.chat_request import ChatRequest
from coordinator.http.completion_request import CompletionRequest
from coordinator.http.messages import Message
from coordinator.http.responses_request import ResponsesRequest
from coordinator.http.tokens import DetokenizeRequest, TokenizeRequest

BODIES: dict[str, tuple[str, type[Fields]]] = {
    "/v1/chat/completions": ("Answers to a chat.", ChatRequest),
    "/v1/completions": ("Texts that go on from prompts.", CompletionRequest),
    "/v1/responses": ("A response to a conversation.", ResponsesRequest),
    "/tokenize": ("Token ids of a text or a chat.", TokenizeRequest),
    "/detokenize": ("The text of token ids.", DetokenizeRequest),
}
STREAMING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
LOOKS = {
    "/v1/models": "What is served.",
    "/v1/models/{name}": "One model.",
    "/health": "Whether a request sent now would be served.",
    "/ready": "As /health.",
    "/live": "Whether the process may be left alone.",
    "/openapi.json": "This document.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


async def openapi(request: Request) -> Response:
    return JSONResponse(document())


@cache
def document() -> dict[str, Any]:
    kinds: list[type[Fields]] = [Message, *(kind for _, kind in BODIES.values())]
    _, schemas = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    paths = {path: {"post": _post(path, *entry)} for path, entry in BODIES.items()}
    paths |= {path: {"get": _get(path, summary)} for path, summary in LOOKS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvrelay", "version": "1", "description": "OpenAI's API, and some of vLLM's."},
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _post(path: str, summary: str, kind: type[Fields]) -> dict[str, Any]:
    body = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": _responses(streams=path in STREAMING),
    }


def _get(path: str, summary: str) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": summary, "responses": _responses(streams=False)}
    if path.endswith("{name}"):
        described["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if path in ("/health", "/ready", "/live"):
        described["security"] = []
        described["responses"] = {code: _json({"type": "object"}) for code in ("200", "503")}
    return described


def _responses(*, streams: bool) -> dict[str, Any]:
    found = _json({"type": "object"})
    if streams:
        found["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {"200": found, "4XX": _json(_REF), "5XX": _json(_REF)}


_REF = {"$ref": "#/components/schemas/Error"}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": "", "content": {"application/json": {"schema": schema}}}
