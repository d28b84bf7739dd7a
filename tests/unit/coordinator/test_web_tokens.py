"""JSON Web Tokens: which hold, and which key sets are refused."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from functools import cache
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from coordinator.identity import Scope
from coordinator.tenants import Tenant
from coordinator.web_tokens import Claims, WebTokens, parse_key_set
from kvrelay.errors import ConfigError, UnauthenticatedError

CLAIMS = Claims("https://issuer.test", "kvrelay", "org")


@cache
def rsa_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


@cache
def ec_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@cache
def ed_key() -> ed25519.Ed25519PrivateKey:
    return ed25519.Ed25519PrivateKey.generate()


def public_jwk(name: str, **more: Any) -> dict[str, Any]:
    by_name = {
        "rsa": lambda: jwt.algorithms.RSAAlgorithm.to_jwk(rsa_key().public_key(), as_dict=True),
        "ec": lambda: jwt.algorithms.ECAlgorithm.to_jwk(ec_key().public_key(), as_dict=True),
        "ed": lambda: jwt.algorithms.OKPAlgorithm.to_jwk(ed_key().public_key(), as_dict=True),
    }
    return {**by_name[name](), "kid": name, **more}


def key_set(*keys: dict[str, Any]) -> WebTokens:
    return parse_key_set(
        json.dumps({"keys": keys or [public_jwk("rsa"), public_jwk("ec"), public_jwk("ed")]}).encode(), CLAIMS
    )


def token(name: str = "ec", algorithm: str = "ES256", kid: str | None = "", **changes: Any) -> str:
    """Signed by the key of that name. A claim that is None is left out."""
    claims = {"iss": CLAIMS.issuer, "aud": "kvrelay", "exp": time.time() + 60, "org": "acme", "sub": "ada", **changes}
    signer: Any = {"rsa": rsa_key, "ec": ec_key, "ed": ed_key}[name]()
    headers = None if kid is None else {"kid": kid or name}
    said = {claim: value for claim, value in claims.items() if value is not None}
    return jwt.encode(said, signer, algorithm, headers)


@pytest.mark.parametrize(("name", "algorithm"), [("rsa", "RS256"), ("rsa", "PS512"), ("ec", "ES256"), ("ed", "EdDSA")])
def test_a_token_proves_to_be_the_tenant_it_names(name: str, algorithm: str) -> None:
    identity = key_set().identify(token(name, algorithm))
    assert identity.tenant == Tenant("acme")
    assert identity.scopes == {Scope.INFER}
    assert identity.name == "ada"


@pytest.mark.parametrize(
    ("claims", "scopes"),
    [
        ({"scope": "infer admin openid"}, {Scope.INFER, Scope.ADMIN}),
        ({"scope": "openid"}, set()),
        ({"scope": ""}, set()),
        ({"scp": ["admin"]}, {Scope.ADMIN}),
        ({"scope": {"admin": True}}, set()),
    ],
)
def test_scopes_are_the_words_of_its_scope_claim(claims: dict[str, Any], scopes: set[Scope]) -> None:
    assert key_set().identify(token(**claims)).scopes == scopes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"exp": time.time() - 60}, "expired"),
        ({"exp": None}, '"exp" claim'),
        ({"nbf": time.time() + 3600}, "not yet valid"),
        ({"iss": "https://other.test"}, "issuer"),
        ({"iss": None}, '"iss" claim'),
        ({"aud": "another"}, "Audience"),
        ({"aud": None}, '"aud" claim'),
        ({"org": None}, "'org' is missing"),
        ({"org": ["acme"]}, "'org' is missing"),
        ({"org": ""}, "'org' is missing"),
        ({"org": "a" * 1_025}, "1 to 1024 bytes"),
        ({"org": "\ud800"}, "1 to 1024 bytes"),
        ({"kid": "other"}, "a key that is not known here"),
        ({"kid": None}, "a key that is not known here"),
    ],
)
def test_a_token_that_does_not_hold_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnauthenticatedError, match=reason):
        key_set().identify(token(**changes))


def test_of_a_single_key_a_token_need_not_name_it() -> None:
    assert key_set(public_jwk("ec")).identify(token(kid=None)).name == "ada"


def test_a_key_for_encryption_signs_nothing_and_the_others_beside_it_do() -> None:
    tokens = key_set(public_jwk("ec", use="sig"), public_jwk("rsa", use="enc", alg="RSA-OAEP"))
    assert tokens.identify(token(kid=None)).name == "ada"
    with pytest.raises(UnauthenticatedError, match="a key that is not known here"):
        tokens.identify(token("rsa", "RS256"))


def test_a_changed_token_is_refused() -> None:
    head, body, signature = token().split(".")
    said = json.loads(base64.urlsafe_b64decode(body + "=="))
    forged = base64.urlsafe_b64encode(json.dumps({**said, "org": "umbrella"}).encode()).rstrip(b"=").decode()
    with pytest.raises(UnauthenticatedError, match="Signature verification failed"):
        key_set().identify(f"{head}.{forged}.{signature}")


def encoded(part: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()


def test_a_token_without_a_signature_is_refused() -> None:
    body = {"iss": CLAIMS.issuer, "aud": "kvrelay", "exp": time.time() + 60, "org": "acme"}
    with pytest.raises(UnauthenticatedError, match="alg"):
        key_set(public_jwk("ec")).identify(f"{encoded({'alg': 'none', 'kid': 'ec'})}.{encoded(body)}.")


def test_the_public_key_is_no_secret_to_sign_with() -> None:
    """HMAC with the PEM of the public key, which everyone has (CVE-2015-9235)."""
    pem = rsa_key().public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    body = {"iss": CLAIMS.issuer, "aud": "kvrelay", "exp": time.time() + 60, "org": "acme"}
    signed = f"{encoded({'alg': 'HS256', 'kid': 'rsa', 'typ': 'JWT'})}.{encoded(body)}"
    signature = base64.urlsafe_b64encode(hmac.digest(pem, signed.encode(), hashlib.sha256)).rstrip(b"=").decode()
    with pytest.raises(UnauthenticatedError, match="alg"):
        key_set().identify(f"{signed}.{signature}")


def test_a_key_that_names_its_algorithm_takes_no_other() -> None:
    tokens = key_set(public_jwk("rsa", alg="RS256"))
    assert tokens.identify(token("rsa", "RS256")).name == "ada"
    with pytest.raises(UnauthenticatedError, match="alg"):
        tokens.identify(token("rsa", "PS256"))


@pytest.mark.parametrize(
    "credential", ["", ".", "..", "a.b.c", "e30.e30.", "e30.e30.e30", "\x00", "é.é.é", "W10.W10.W10"]
)
def test_what_is_no_token_is_refused(credential: str) -> None:
    with pytest.raises(UnauthenticatedError):
        key_set().identify(credential)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "not {"),
        (b"[]", "not {"),
        (b"\xff", "not {"),
        (b'{"keys": 3}', "not {"),
        (b'{"keys": ' + b"[" * 100_000, "not {"),
        (b'{"keys": [3]}', "not {"),
        (b'{"keys": []}', "holds no key"),
        (b'{"keys": [{"kty": "RSA", "use": "enc"}]}', "holds no key for signatures"),
        (b'{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}', "kty 'oct'; allowed are RSA"),
        (b'{"keys": [{"kty": "RSA"}]}', "not {"),
        (b'{"keys": [{"kty": "EC", "crv": "P-256", "d": "AA"}]}', "private key"),
        (b'{"keys": [{"kty": "RSA", "alg": "HS256"}]}', "alg 'HS256'; allowed are RS256"),
    ],
)
def test_a_key_set_that_makes_no_sense_is_refused(text: bytes, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_key_set(text, CLAIMS)
