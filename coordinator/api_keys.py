"""API keys: what a client shows, and what the coordinator keeps of it.

A key is `kvrelay-ID-SECRET`, the secret 256 random bits. The file holds a line of TOML for each, with a SHA-256 of the
secret: a slow hash (scrypt) guards what people choose, which can be guessed; 2**256 cannot be, and one of 50 ms would
let anyone stop the event loop by sending wrong keys.

    search-1 = { tenant = "search", sha256 = "9f86d0...", scopes = ["infer"], expires = 2027-01-01T00:00:00Z }
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from coordinator.identity import CallerLimits, Identity, Scope
from coordinator.tenants import Tenant
from kvrelay.errors import ConfigError, InvalidRequestError, UnauthenticatedError
from kvrelay.types import check_tenant_name

PREFIX = "kvrelay-"
SECRET_BYTES = 32
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NOBODYS = bytes(32)  # compared with where the id is unknown, so that this takes no less time
_TERMS = ("tenant", "sha256", "scopes", "expires", "max_open")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One line of the file. Times are seconds since 1970; None never ends."""

    identity: Identity
    digest: bytes
    expires_at: float | None = None


class ApiKeys:
    def __init__(self, keys: Mapping[str, ApiKey]) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def identify(self, credential: str, now: float) -> Identity:
        """Raises UnauthenticatedError; what is wrong with a key is told only to who has its secret."""
        key_id, _, secret = credential.removeprefix(PREFIX).rpartition("-")
        key = self._keys.get(key_id)
        is_right = hmac.compare_digest(_digest(secret), key.digest if key is not None else _NOBODYS)
        if key is None or not is_right:
            raise UnauthenticatedError("the API key is not known here")
        if key.expires_at is not None and now >= key.expires_at:
            raise UnauthenticatedError(f"the API key {key_id} has expired")
        return key.identity


def new_key(
    tenant: str, key_id: str, scopes: frozenset[Scope], expires: datetime | None = None, max_open: int = 0
) -> tuple[str, str]:
    """A key, and its line of the file. Raises ConfigError."""
    if not _ID.fullmatch(key_id):
        raise ConfigError(f"the key's id is {key_id!r}; allowed are 1 to 64 letters, digits, - and _")
    secret = secrets.token_hex(SECRET_BYTES)
    # JSON spells a printable text and a list of words as TOML does.
    terms = [f"tenant = {json.dumps(tenant, ensure_ascii=False)}", f'sha256 = "{_digest(secret).hex()}"']
    terms.append(f"scopes = {json.dumps(sorted(scope.value for scope in scopes))}")
    if expires is not None:
        terms.append(f"expires = {expires.astimezone(UTC).strftime('%Y-%m-%dT%H:%M:%SZ')}")
    if max_open != 0:
        terms.append(f"max_open = {max_open}")
    line = f"{key_id} = {{ {', '.join(terms)} }}"
    parse_keys(line.encode())
    return f"{PREFIX}{key_id}-{secret}", line


def parse_keys(text: bytes) -> ApiKeys:
    """Of a file's bytes. Raises ConfigError that says which key is wrong, and in what."""
    try:
        tables = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the API keys are not TOML: {error}") from error
    return ApiKeys({key_id: _parse_key(key_id, table) for key_id, table in tables.items()})


def _parse_key(key_id: str, table: Any) -> ApiKey:
    try:
        if not _ID.fullmatch(key_id):
            raise ConfigError("allowed in an id are 1 to 64 letters, digits, - and _")
        if not isinstance(table, dict):
            raise ConfigError('terms are needed, such as { tenant = "search", sha256 = "...", scopes = ["infer"] }')
        for term in table:
            if term not in _TERMS:
                raise ConfigError(f"{term!r} is no term of a key; allowed are {', '.join(_TERMS)}")
        limits = CallerLimits(_max_open(table.get("max_open", 0)))
        identity = Identity(_tenant(table.get("tenant")), _scopes(table.get("scopes")), limits, key_id)
        return ApiKey(identity, _parse_digest(table.get("sha256")), _expires_at(table.get("expires")))
    except (ConfigError, InvalidRequestError) as error:
        raise ConfigError(f"the API key {key_id!r}: {error.message}") from error


def _tenant(value: Any) -> Tenant:
    if not isinstance(value, str):
        raise ConfigError("tenant is missing, or no text")
    check_tenant_name(value)
    return Tenant(value)


def _scopes(value: Any) -> frozenset[Scope]:
    allowed = {scope.value: scope for scope in Scope}
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one in allowed for one in value):
        raise ConfigError(f"scopes is {value!r}; allowed is a list of one or more of {', '.join(allowed)}")
    return frozenset(allowed[one] for one in value)


def _parse_digest(value: Any) -> bytes:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ConfigError("sha256 is missing, or not 64 hexadecimal digits in lower case")
    return bytes.fromhex(value)


def _expires_at(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise ConfigError(f"expires is {value!r}; allowed is a time with its zone, such as 2027-01-01T00:00:00Z")
    return value.timestamp()


def _max_open(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"max_open is {value!r}; allowed is a whole number of at least 0, where 0 sets no bound")
    return value


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "replace")).digest()
