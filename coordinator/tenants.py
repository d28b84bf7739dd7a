"""Isolation domains: whose cached KV a request may find, and whose it makes.

A salt enters the root of every block hash, so requests of different salts never share a block, in no node and in no
store. It is derived here, from who the caller is proven to be; what a client writes into its request only divides its
tenant's own blocks further. The exception has to be named: a public namespace, which every tenant may name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvrelay.errors import ConfigError, InvalidRequestError
from kvrelay.inference import GenerateRequest
from kvrelay.kv.hashing import hash_fields
from kvrelay.types import DEFAULT_TENANT, MAX_TENANT_CHARS, check_ttl_s

MAX_SALT_BYTES = 1_024
MIN_SECRET_BYTES = 16
_VERSION = b"kvrelay-tenant-v1"
_DIGEST_CHARS = 16  # of a long name's label: 64 bits, and quotas, not isolation, hang on it


@dataclass(frozen=True, slots=True)
class Tenant:
    """`name` is what proved the identity calls it, of whatever length: the whole of it enters the salt."""

    name: str = DEFAULT_TENANT

    @property
    def label(self) -> str:
        """What nodes and stores account under: the name, or where that is too long or unprintable a part of it and a
        digest of the whole."""
        if 1 <= len(self.name) <= MAX_TENANT_CHARS and self.name.isprintable():
            return self.name
        digest = hash_fields(_VERSION, b"label", self.name.encode()).hex()[:_DIGEST_CHARS]
        shown = "".join(char for char in self.name if char.isprintable())
        return f"{shown[: MAX_TENANT_CHARS - 1 - len(digest)]}~{digest}"


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Which blocks a request finds (those of `salt`, 32 bytes), and what a kvstore does with those it makes."""

    salt: bytes
    tenant: str = DEFAULT_TENANT  # a label
    ttl_s: float | None = None  # None: as for all of the tenant's; 0: no end


class Salts:
    """Makes scopes. `cluster_secret` keeps others from computing a block's name out of its tokens; coordinators of one
    cluster need the same, or they share no prefix, and a new one leaves all that is stored unfound."""

    def __init__(self, cluster_secret: bytes = b"") -> None:
        self._secret = cluster_secret

    def scope(self, tenant: Tenant, request: GenerateRequest) -> CacheScope:
        """Raises InvalidRequestError for what the request says of caching."""
        check_cache_fields(request)
        return CacheScope(self._salt(tenant, request), tenant.label, request.cache_ttl_s)

    def _salt(self, tenant: Tenant, request: GenerateRequest) -> bytes:
        """The kind is a field of its own, so that no tenant's name or salt can spell a public namespace."""
        if request.public_cache:
            return hash_fields(_VERSION, b"public", self._secret, b"", request.public_cache.encode())
        own = (request.cache_salt or "").encode()
        return hash_fields(_VERSION, b"private", self._secret, tenant.name.encode(), own)


def check_cache_fields(request: GenerateRequest) -> None:
    """Raises InvalidRequestError, naming the value and what is allowed."""
    check_ttl_s("cache_ttl_s", request.cache_ttl_s)
    if request.cache_salt == "":
        raise InvalidRequestError("cache_salt is empty; leave it out to share with all of the tenant's requests")
    if request.cache_salt is not None and request.public_cache:
        raise InvalidRequestError(
            "cache_salt and public_cache are both set; the one keeps KV apart and the other shares it, so choose one"
        )
    for name, value in (("cache_salt", request.cache_salt or ""), ("public_cache", request.public_cache)):
        num_bytes = len(value.encode())
        if num_bytes > MAX_SALT_BYTES:
            raise InvalidRequestError(f"{name} has {num_bytes} bytes; at most {MAX_SALT_BYTES} are allowed")


def read_secret(path: str) -> bytes:
    """The file's bytes, less what whitespace surrounds them; none without a file. Raises ConfigError."""
    if not path:
        return b""
    try:
        secret = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read cluster_secret_file {path}: {error.strerror}") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"cluster_secret_file {path} holds {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed, such as "
            "`openssl rand -hex 32` writes"
        )
    return secret
