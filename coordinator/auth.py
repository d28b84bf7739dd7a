"""Turns what a client shows into who it is. Every door asks here, before it looks at anything else of a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from coordinator.api_keys import PREFIX, ApiKeys, parse_keys
from coordinator.config import CoordinatorConfig
from coordinator.identity import ANYONE, Identity
from coordinator.web_tokens import Claims, WebTokens, parse_key_set
from kvrelay.errors import UnauthenticatedError
from kvrelay.watched_file import WatchedFiles

MAX_CREDENTIAL_CHARS = 8_192
_SCHEME = "Bearer "


class Authenticator:
    """Without keys and tokens everyone is ANYONE. `now` gives seconds since 1970."""

    def __init__(
        self,
        keys: WatchedFiles[ApiKeys] | None = None,
        tokens: WatchedFiles[WebTokens] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._keys = keys
        self._tokens = tokens
        self._now = now

    @property
    def knows_callers(self) -> bool:
        """Whether a call needs a credential."""
        return self._keys is not None or self._tokens is not None

    def identify(self, credential: str | None) -> Identity:
        """`credential` is an API key or a token, bare; None where the call shows none. Raises UnauthenticatedError."""
        if not self.knows_callers:
            return ANYONE
        if not credential:
            raise UnauthenticatedError("no credential; send an API key or a token as `authorization: Bearer ...`")
        if len(credential) > MAX_CREDENTIAL_CHARS:
            raise UnauthenticatedError(f"the credential has more than {MAX_CREDENTIAL_CHARS} characters")
        if credential.startswith(PREFIX) and self._keys is not None:
            return self._keys.value.identify(credential, self._now())
        if self._tokens is not None:
            return self._tokens.value.identify(credential)
        raise UnauthenticatedError("the API key is not known here")


def bearer(authorization: str | None) -> str | None:
    """The credential in an `authorization` header. Raises UnauthenticatedError for another scheme than Bearer."""
    if authorization is None:
        return None
    if not authorization.startswith(_SCHEME):
        raise UnauthenticatedError("the authorization header is not `Bearer`, a space and a credential")
    return authorization.removeprefix(_SCHEME)


def make_authenticator(config: CoordinatorConfig) -> Authenticator:
    """Raises ConfigError for files that cannot be read."""
    keys = WatchedFiles([Path(config.api_keys_file).expanduser()], parse_keys) if config.api_keys_file else None
    if not config.jwks_file:
        return Authenticator(keys)
    claims = Claims(config.jwt_issuer, config.jwt_audience, config.jwt_tenant_claim)
    tokens = WatchedFiles([Path(config.jwks_file).expanduser()], partial(parse_key_set, claims=claims))
    return Authenticator(keys, tokens)
