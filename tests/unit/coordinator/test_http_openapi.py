"""The OpenAPI document is of the paths that are served and of the fields that are read."""

from __future__ import annotations

import json
from typing import Any

from starlette.routing import Route

from coordinator.auth import Authenticator
from coordinator.http.app import make_app
from coordinator.http.chat_request import ChatRequest
from coordinator.http.openapi import document
from kvrelay.rpc.health import Readiness


def test_it_has_every_path_and_method() -> None:
    app = make_app(None, Readiness(), Authenticator())  # type: ignore[arg-type]  # nothing is asked of the door
    served = {
        (route.path.replace(":path", ""), method.lower())
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or ())
        if method != "HEAD"
    }
    assert {(path, method) for path, methods in document()["paths"].items() for method in methods} == served


def test_bodies_have_every_field_and_refused_ones_only_what_asks_for_nothing() -> None:
    schema = document()["components"]["schemas"]["ChatRequest"]
    assert schema["properties"].keys() == ChatRequest.model_fields.keys() | ChatRequest.refused.keys()
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["messages"]
    assert schema["properties"]["store"] == {
        "enum": [None, False],
        "description": "Not served: no conversation is stored.",
    }


def test_every_reference_leads_somewhere() -> None:
    text = json.dumps(document())
    schemas: dict[str, Any] = document()["components"]["schemas"]
    prefix = "#/components/schemas/"
    assert {part.split('"')[0] for part in text.split(prefix)[1:]} <= schemas.keys()
