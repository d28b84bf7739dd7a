"""JSON Web Tokens of an issuer whose public keys are in a file, as RFC 7517 and RFC 7519 define both.

Which algorithms a key takes is read from the key, never from the token: a token that names none, or HMAC with a public
key for its secret, is refused (RFC 8725, section 3.1).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jwt

from coordinator.identity import Identity, Scope
from coordinator.tenants import Tenant
from kvrelay.errors import ConfigError, UnauthenticatedError

LEEWAY_S = 10.0  # that the issuer's clock may be ahead of or behind ours
MAX_TENANT_BYTES = 1_024
_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_BY_KIND = {"RSA": _RSA, "OKP": ("EdDSA",)}
_BY_CURVE = {"P-256": ("ES256",), "P-384": ("ES384",), "P-521": ("ES512",)}


@dataclass(frozen=True, slots=True)
class Claims:
    """What a token must say."""

    issuer: str
    audience: str
    tenant_claim: str  # whose value names the tenant


@dataclass(frozen=True, slots=True)
class PublicKey:
    key: Any  # of the cryptography package, untyped in PyJWT
    algorithms: Sequence[str]


class WebTokens:
    """`keys` by their ids; of a single one a token need not name it."""

    def __init__(self, keys: Mapping[str, PublicKey], claims: Claims) -> None:
        self._keys = keys
        self._claims = claims

    def identify(self, token: str) -> Identity:
        """Raises UnauthenticatedError."""
        try:
            key = self._key_of(jwt.get_unverified_header(token).get("kid"))
            said = jwt.decode(
                token,
                key.key,
                algorithms=key.algorithms,
                issuer=self._claims.issuer,
                audience=self._claims.audience,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.PyJWTError as error:
            raise UnauthenticatedError(f"the token does not hold: {error}") from error
        tenant = said.get(self._claims.tenant_claim)
        if not isinstance(tenant, str) or not 1 <= _num_bytes(tenant) <= MAX_TENANT_BYTES:
            raise UnauthenticatedError(
                f"the token's claim {self._claims.tenant_claim!r} is missing, or not a text of 1 to "
                f"{MAX_TENANT_BYTES} bytes: it names the tenant"
            )
        return Identity(Tenant(tenant), _scopes(said.get("scope", said.get("scp"))), name=str(said.get("sub", tenant)))

    def _key_of(self, key_id: Any) -> PublicKey:
        if key_id is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        key = self._keys.get(key_id) if isinstance(key_id, str) else None
        if key is None:
            raise UnauthenticatedError("the token is signed by a key that is not known here")
        return key


def parse_key_set(text: bytes, claims: Claims) -> WebTokens:
    """Of a JWKS file's bytes. Issuers such as Keycloak list keys for encryption too, which are left out.

    Raises ConfigError.
    """
    try:
        listed = json.loads(text)["keys"]
        signing = [one for one in listed if one.get("use", "sig") == "sig"]
        keys = {str(one.get("kid", index)): _public_key(one) for index, one in enumerate(signing)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, jwt.PyJWTError) as error:
        raise ConfigError(f'the JWKS file is not {{"keys": [...]}} of public keys: {error}') from error
    if not keys:
        raise ConfigError("the JWKS file holds no key for signatures")
    return WebTokens(keys, claims)


def _num_bytes(text: str) -> int:
    """In UTF-8; 0 where it has no such form: JSON can spell half a character."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0


def _public_key(one: Mapping[str, Any]) -> PublicKey:
    kind = str(one.get("kty"))
    possible = _BY_CURVE.get(str(one.get("crv")), ()) if kind == "EC" else _BY_KIND.get(kind, ())
    if not possible:
        raise ConfigError(f"the JWKS file has a key of kty {kind!r}; allowed are RSA, OKP, EC on P-256, P-384 or P-521")
    if "d" in one:
        raise ConfigError("the JWKS file holds a private key; only the issuer may have it")
    named = one.get("alg")
    if named is not None and named not in possible:
        allowed = ", ".join(possible)
        raise ConfigError(f"the JWKS file has a key of kty {kind!r} with alg {named!r}; allowed are {allowed}")
    algorithms = (str(named),) if named else possible
    return PublicKey(jwt.PyJWK(dict(one), algorithm=algorithms[0]).key, algorithms)


def _scopes(value: Any) -> frozenset[Scope]:
    """Words with spaces between (RFC 8693) or a list; words of others count for nothing. Without the claim: INFER."""
    if value is None:
        return frozenset({Scope.INFER})
    words = value.split() if isinstance(value, str) else value if isinstance(value, list) else []
    return frozenset(scope for scope in Scope if scope.value in words)
