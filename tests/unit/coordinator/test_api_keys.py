"""API keys: who a key proves to be, and which files are refused."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from coordinator.api_keys import new_key, parse_keys
from coordinator.identity import CallerLimits, Identity, Scope
from coordinator.tenants import Tenant
from kvrelay.errors import ConfigError, UnauthenticatedError

EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
ABC_SHA256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2's example
LINE = f'one = {{ tenant = "acme", sha256 = "{ABC_SHA256}", scopes = ["infer"] }}'


def test_a_key_proves_to_be_the_tenant_of_its_line() -> None:
    identity = parse_keys(LINE.encode()).identify("kvrelay-one-abc", 0.0)
    assert identity == Identity(Tenant("acme"), frozenset({Scope.INFER}), CallerLimits(), "one")


@pytest.mark.parametrize(
    "credential",
    [
        "",
        "kvrelay-one-abd",
        "kvrelay-one-",
        "kvrelay-two-abc",
        "kvrelay-abc",
        "kvrelay--abc",
        "abc",
        "one",
        "-",
        "ß" * 99,
    ],
)
def test_nothing_else_does(credential: str) -> None:
    with pytest.raises(UnauthenticatedError, match="the API key is not known here"):
        parse_keys(LINE.encode()).identify(credential, 0.0)


def test_an_unknown_id_is_no_way_in_by_the_empty_secret() -> None:
    keys = parse_keys(LINE.replace(ABC_SHA256, EMPTY_SHA256).encode())
    with pytest.raises(UnauthenticatedError):
        keys.identify("kvrelay-two-", 0.0)


def test_a_key_ends_at_its_time() -> None:
    keys = parse_keys(LINE.replace(" }", ", expires = 1970-01-01T00:01:40Z }").encode())
    assert keys.identify("kvrelay-one-abc", 99.9).name == "one"
    with pytest.raises(UnauthenticatedError, match="one has expired"):
        keys.identify("kvrelay-one-abc", 100.0)


def test_a_new_key_is_known_by_its_line_which_does_not_hold_it() -> None:
    expires = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    key, line = new_key('a "b" \\ é', "my-key_1", frozenset(Scope), expires, max_open=3)
    identity = parse_keys(line.encode()).identify(key, 0.0)
    assert identity == Identity(Tenant('a "b" \\ é'), frozenset(Scope), CallerLimits(3), "my-key_1")
    assert "expires = 2030-01-02T03:04:05Z" in line
    assert len(key) == len("kvrelay-my-key_1-") + 64
    assert key.rpartition("-")[2] not in line


def test_no_two_new_keys_are_alike() -> None:
    assert len({new_key("acme", "one", frozenset({Scope.INFER}))[0] for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("one = 3", "'one': terms are needed"),
        ("one = [", "not TOML"),
        ("one = " + "[" * 10_000, "not TOML"),
        ("one = " + "9" * 5_000, "not TOML"),
        (LINE + "\n" + LINE, "not TOML"),
        (LINE.replace("tenant =", "tennant ="), "'tennant' is no term of a key; allowed are tenant, sha256"),
        (LINE.replace('"acme"', '""'), "tenant is ''; allowed are 1 to 64 printable characters"),
        (LINE.replace('tenant = "acme", ', ""), "tenant is missing"),
        (LINE.replace(ABC_SHA256, ABC_SHA256[1:]), "not 64 hexadecimal digits"),
        (LINE.replace(ABC_SHA256, ABC_SHA256.upper()), "not 64 hexadecimal digits"),
        (LINE.replace('["infer"]', "[]"), r"scopes is \[\]; allowed is a list of one or more of infer, admin"),
        (LINE.replace('["infer"]', '["root"]'), r"scopes is \['root'\]"),
        (LINE.replace(" }", ", expires = 2030-01-01 }"), "a time with its zone"),
        (LINE.replace(" }", ", expires = 2030-01-01T00:00:00 }"), "a time with its zone"),
        (LINE.replace(" }", ", max_open = -1 }"), "max_open is -1; allowed is a whole number of at least 0"),
        (LINE.replace(" }", ", max_open = true }"), "max_open is True"),
        ('"a b" = { tenant = "acme" }', "letters, digits, - and _"),
    ],
)
def test_a_line_that_makes_no_sense_is_named(line: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_keys(line.encode())


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ConfigError, match="not TOML"):
        parse_keys(b"\xff")


@pytest.mark.parametrize("key_id", ["", "a b", "a.b", "é", "a" * 65])
def test_an_id_that_no_file_could_hold_is_refused(key_id: str) -> None:
    with pytest.raises(ConfigError, match="letters, digits, - and _"):
        new_key("acme", key_id, frozenset({Scope.INFER}))
