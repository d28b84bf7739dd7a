"""One door for both kinds of credential, and files that change."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from coordinator.api_keys import new_key
from coordinator.auth import Authenticator, bearer, make_authenticator
from coordinator.config import CoordinatorConfig
from coordinator.identity import ANYONE, Identity, Scope
from coordinator.tenants import Tenant
from kvrelay.errors import ConfigError, PermissionDeniedError, UnauthenticatedError

INFER = frozenset({Scope.INFER})


def config(tmp_path: Path, **changes: object) -> CoordinatorConfig:
    return CoordinatorConfig(model=tmp_path, cluster_port=0, **changes)  # type: ignore[arg-type]


def test_without_keys_everyone_is_anyone(tmp_path: Path) -> None:
    authenticator = make_authenticator(config(tmp_path))
    assert not authenticator.knows_callers
    assert authenticator.identify(None) is ANYONE
    assert authenticator.identify("kvrelay-one-abc") is ANYONE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def authenticator(file: Path) -> Authenticator:
    return make_authenticator(config(file.parent, api_keys_file=str(file)))


@pytest.mark.parametrize("credential", [None, "", "kvrelay-one-abc", "sk-proj-1", "a.b.c", "x" * 8_193])
def test_with_keys_nobody_else_is_someone(file: Path, credential: str | None) -> None:
    file.write_text("")
    assert authenticator(file).knows_callers
    with pytest.raises(UnauthenticatedError):
        authenticator(file).identify(credential)


def test_a_key_that_is_added_or_deleted_holds_or_ends_at_once(file: Path) -> None:
    first, first_line = new_key("acme", "one", INFER)
    second, second_line = new_key("umbrella", "two", INFER)
    file.write_text(first_line)
    keys = authenticator(file)
    assert keys.identify(first).tenant == Tenant("acme")
    file.write_text(second_line)
    assert keys.identify(second).tenant == Tenant("umbrella")
    with pytest.raises(UnauthenticatedError):
        keys.identify(first)


@pytest.mark.parametrize("bad", [b"no TOML", b"one = 3", None], ids=["no TOML", "no key", "no file"])
def test_a_bad_new_file_leaves_the_old_keys_and_says_so_once(
    file: Path, bad: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    key, line = new_key("acme", "one", INFER)
    file.write_text(line)
    keys = authenticator(file)
    if bad is None:
        file.unlink()
    else:
        file.write_bytes(bad)
    for _ in range(3):
        assert keys.identify(key).tenant == Tenant("acme")
    (error,) = (record for record in caplog.records if record.levelno == logging.ERROR)
    assert str(file) in error.getMessage()
    file.write_text(line.replace("acme", "umbrella"))
    assert keys.identify(key).tenant == Tenant("umbrella")


def test_a_file_behind_a_link_that_is_turned_is_read_anew(tmp_path: Path, file: Path) -> None:
    """As Kubernetes changes a mounted secret; sizes and times may be the same."""
    key, line = new_key("acme", "one", INFER)
    for name, text in (("before", line), ("after", line.replace("acme", "ecma"))):
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (1, 1))
    file.symlink_to(tmp_path / "before")
    keys = authenticator(file)
    (tmp_path / "new").symlink_to(tmp_path / "after")
    (tmp_path / "new").replace(file)
    assert keys.identify(key).tenant == Tenant("ecma")


def test_a_file_that_is_not_there_at_the_start_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*keys\.toml: No such file"):
        authenticator(file)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"jwks_file": "keys.json"}, "jwt_issuer is missing"),
        ({"jwks_file": "keys.json", "jwt_issuer": "x"}, "jwt_audience is missing"),
        ({"jwt_audience": "x"}, "no jwks_file"),
        ({"api_keys_file": "keys.toml", "cluster_port": -1}, "cluster_port is missing"),
    ],
)
def test_settings_that_would_leave_a_hole_are_refused(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    settings = {"cluster_port": 0, **changes}
    with pytest.raises(ConfigError, match=reason):
        CoordinatorConfig(model=tmp_path, **settings).check()  # type: ignore[arg-type]


def test_the_credential_is_what_follows_bearer() -> None:
    assert bearer(None) is None
    assert bearer("Bearer kvrelay-one-abc") == "kvrelay-one-abc"
    for header in ("", "Bearer", "bearer kvrelay-one-abc", "Basic dTpw", "kvrelay-one-abc"):
        with pytest.raises(UnauthenticatedError):
            bearer(header)


def test_who_lacks_a_scope_is_told_which() -> None:
    with pytest.raises(PermissionDeniedError, match="needs the scope admin; one has infer"):
        Identity(scopes=INFER, name="one").check(Scope.ADMIN)
