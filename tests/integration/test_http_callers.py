"""The HTTP door where callers are known: nothing but health answers who is not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.routing import Route

from coordinator.api_keys import new_key
from coordinator.http.app import make_app
from coordinator.http.callers import OPEN_PATHS
from coordinator.identity import Scope
from tests.support.http_ends import HELLO, HttpEnds, error_of, http_ends

VERBS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")
ODD_PATHS = (
    *("/", "//v1/models", "/v1/../v1/models", "/V1/models", "/v1/models/", "/v1/chat/completions?x=/health"),
    *("/health/", "//health", "/health/../v1/models", "/HEALTH", "/%68ealth/x", "/metrics", "/docs"),
)


@asynccontextmanager
async def guarded(tmp_path: Path) -> AsyncIterator[tuple[HttpEnds, str, str]]:
    """With a key that may ask, and one that may only look at the cluster."""
    infer, infer_line = new_key("acme", "one", frozenset({Scope.INFER}))
    admin, admin_line = new_key("acme", "two", frozenset({Scope.ADMIN}))
    both, both_line = new_key("ops", "three", frozenset(Scope))
    keys = {"api_keys_file": str(tmp_path / "keys.toml"), "cluster_port": 0}
    (tmp_path / "keys.toml").write_text(f"{infer_line}\n{admin_line}\n{both_line}")
    async with http_ends(api_key=both, **keys) as ends:
        yield ends, infer, admin


async def test_nobody_unknown_is_answered_on_any_route(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (ends, infer, _):
        app = make_app(ends.cluster.app.door, ends.cluster.readiness, ends.cluster.app.authenticator)
        routes = [route.path for route in app.routes if isinstance(route, Route)]
        paths = [path for path in routes if path not in OPEN_PATHS]
        assert "/v1/chat/completions" in paths
        headers = [
            {},
            *({"authorization": shown} for shown in ("Bearer", "Bearer x", f"bearer {infer}", f"Basic {infer}", infer)),
            {"x-api-key": infer},
        ]
        for path in (*paths, *ODD_PATHS):
            for shown in headers:
                reply = await ends.http.post(path, json=HELLO, headers=shown)
                assert reply.status_code == 401, (path, shown)
                assert error_of(reply)["code"] == "unauthenticated"
                assert reply.headers["www-authenticate"] == "Bearer"
        for verb in VERBS:
            assert (await ends.http.request(verb, "/v1/models")).status_code == 401


async def test_health_answers_everyone(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (ends, _, _):
        assert {path: (await ends.http.get(path)).status_code for path in OPEN_PATHS} == dict.fromkeys(OPEN_PATHS, 200)


async def test_a_key_is_let_in_as_its_tenant_and_one_without_the_scope_is_not(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (ends, infer, admin):
        body = HELLO | {"max_tokens": 2, "request_id": "mine"}
        reply = await ends.post("/v1/chat/completions", body, authorization=f"Bearer {infer}")
        assert reply.status_code == 200
        assert json.loads(reply.text)["usage"]["completion_tokens"] == 2
        assert ends.cluster.decode[0].requests[-1].tenant == "acme"
        refused = await ends.post("/v1/chat/completions", body, authorization=f"Bearer {admin}")
        assert (refused.status_code, error_of(refused)["code"]) == (403, "permission_denied")
