"""Who shares cached KV with whom: salts are told apart by every field they are made of, and by nothing else."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.tenants import CacheScope, Salts, Tenant, read_secret
from kvrelay.errors import ConfigError, InvalidRequestError
from kvrelay.inference import GenerateRequest, TokenPrompt
from kvrelay.types import check_tenant_name

SALTS = Salts(b"the cluster's secret")


def request(**changes: Any) -> GenerateRequest:
    return GenerateRequest(TokenPrompt((1,)), **changes)


def salt(tenant: str, **changes: Any) -> bytes:
    return SALTS.scope(Tenant(tenant), request(**changes)).salt


def field(value: bytes) -> bytes:
    return len(value).to_bytes(4, "little") + value


def test_a_salt_is_a_hash_of_fields_with_their_lengths() -> None:
    """Written out, so that a coordinator of another release derives the same."""
    fields = (b"kvrelay-tenant-v1", b"private", b"the cluster's secret", b"acme", b"mine")
    assert salt("acme", cache_salt="mine") == hashlib.sha256(b"".join(map(field, fields))).digest()
    fields = (b"kvrelay-tenant-v1", b"public", b"the cluster's secret", b"", b"docs")
    assert salt("acme", public_cache="docs") == hashlib.sha256(b"".join(map(field, fields))).digest()


def test_no_two_ways_to_fill_the_fields_give_one_salt() -> None:
    """vllm#12621, vllm#54727, confidential-model-router#386: fields joined without their lengths ran together."""
    ways = [
        salt("org1"),
        salt("org12"),
        salt("default"),
        salt("org1", cache_salt="23"),
        salt("org12", cache_salt="3"),
        salt("org123", cache_salt=" "),
        salt("org1", cache_salt="2\0003"),
        salt("org1", cache_salt="2:3"),
        salt("org1", cache_salt="2/3"),
        salt("org1:2", cache_salt="3"),
        salt("", cache_salt="org123"),
        salt("org1", public_cache="23"),
        salt("public", cache_salt="23"),
        salt("", cache_salt="23"),
        Salts(b"another secret").scope(Tenant("org1"), request()).salt,
        Salts().scope(Tenant("org1"), request()).salt,
        b"",  # of a request that no coordinator sent
    ]
    assert len(set(ways)) == len(ways)


@given(st.tuples(st.text(), st.text(min_size=1)), st.tuples(st.text(), st.text(min_size=1)))
def test_different_tenants_or_salts_are_different_scopes(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (salt(one[0], cache_salt=one[1]) == salt(other[0], cache_salt=other[1])) == (one == other)


@given(st.text(), st.text(min_size=1), st.none() | st.text(min_size=1))
def test_no_private_scope_is_a_public_one(tenant: str, name: str, cache_salt: str | None) -> None:
    assert salt(tenant, public_cache=name) != salt(tenant, cache_salt=cache_salt)


def test_what_the_default_tenant_makes_is_private_to_it() -> None:
    assert len(salt("default")) == 32
    assert salt("default") != salt("acme")


def test_a_public_namespace_is_the_same_for_every_tenant() -> None:
    assert salt("acme", public_cache="docs") == salt("default", public_cache="docs")


def test_a_victims_salt_is_of_no_use_to_another_tenant() -> None:
    """vllm#39082, sglang#9163: a salt that the client chose alone could be named by anyone."""
    victims = salt("victim", cache_salt="s3cret")
    attempts = itertools.product(("attacker", "victim\0", ""), ("s3cret", "victim", victims.hex(), None))
    assert victims not in {salt(tenant, cache_salt=guess) for tenant, guess in attempts}
    assert victims not in {salt("attacker", public_cache=guess) for guess in ("s3cret", "victim", victims.hex())}


def test_a_scope_says_whose_quota_and_how_long() -> None:
    scope = SALTS.scope(Tenant("acme"), request(cache_ttl_s=0.0))
    assert scope == CacheScope(salt("acme"), "acme", 0.0)
    assert SALTS.scope(Tenant("acme"), request(public_cache="docs")).tenant == "acme"
    assert SALTS.scope(Tenant(), request()) == CacheScope(salt("default"), "default", None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_salt": ""}, "cache_salt is empty; leave it out to share with all of the tenant's requests"),
        ({"cache_salt": "a", "public_cache": "b"}, "cache_salt and public_cache are both set"),
        ({"cache_salt": "x" * 1025}, "cache_salt has 1025 bytes; at most 1024 are allowed"),
        ({"public_cache": "\N{PILE OF POO}" * 257}, "public_cache has 1028 bytes; at most 1024 are allowed"),
        ({"cache_ttl_s": -0.5}, "cache_ttl_s is -0.5; allowed is a number of seconds of at least 0"),
    ],
)
def test_what_a_request_may_not_say(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SALTS.scope(Tenant(), request(**changes))


def test_long_names_and_salts_work_and_are_told_apart_by_their_ends() -> None:
    """py-lmdb#152: what was cut to a key's length ran together."""
    names = ["模型" * 200 + end for end in ("a", "b")]
    salts = ["s" * 999 + end for end in ("a", "b")]
    scopes = [SALTS.scope(Tenant(name), request(cache_salt=one)) for name in names for one in salts]
    assert len({scope.salt for scope in scopes}) == 4
    assert len({scope.tenant for scope in scopes}) == 2
    for scope in scopes:
        check_tenant_name(scope.tenant)
        assert scope.tenant.startswith("模型模型")


@given(st.text(max_size=200))
def test_every_name_has_a_label_that_stores_take(name: str) -> None:
    check_tenant_name(Tenant(name).label)


def test_a_label_is_the_name_where_that_can_be_shown() -> None:
    assert Tenant("acme / team 1").label == "acme / team 1"
    assert Tenant("a\x1b[2J").label.startswith("a[2J~")


def test_a_secret_is_what_its_file_holds(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"0123456789abcdef\n")
    assert read_secret(str(file)) == b"0123456789abcdef"
    assert read_secret("") == b""
    file.write_bytes(b"short \n")
    with pytest.raises(ConfigError, match="holds 5 bytes; at least 16 are needed"):
        read_secret(str(file))
    with pytest.raises(ConfigError, match=r"cannot read cluster_secret_file .*: No such file"):
        read_secret(str(tmp_path / "missing"))
