"""TLS of both sides of a connection, from PEM files that may be replaced while the process runs.

Between roles it is mutual: each side shows a certificate, and each asks for one that the peers' CA has signed. The name
a certificate is checked for is the host of the address that was dialled, so it must be among the certificate's subject
alternative names. Clients show none: they prove who they are by a key or a token.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, Self

import grpc

from kvrelay.errors import ConfigError
from kvrelay.role_config import RoleConfig
from kvrelay.watched_file import WatchedFiles

_NO_PASSWORD = "none"  # of a key that has one: without this OpenSSL would ask for it at the terminal


class ChannelTLS(Protocol):
    """What a channel is opened with. `version` counts how often its files changed."""

    @property
    def version(self) -> int: ...

    def of_channel(self) -> grpc.ChannelCredentials: ...


class ServerTLS(Protocol):
    """What a port is opened with."""

    def of_server(self) -> grpc.ServerCredentials: ...


@dataclass(frozen=True, slots=True)
class MutualTLS:
    """PEM texts of one process. Which of them do not fit together is found by whoever listens or dials with them."""

    ca: bytes  # the only one that may have signed the other side's certificate
    certificate: bytes  # this side's, with what lies between it and the CA, if anything does
    key: bytes = field(repr=False)
    version: int = 0

    @classmethod
    def read(cls, ca: Path, certificate: Path, key: Path) -> Self:
        """Raises ConfigError for a file that cannot be read or is no PEM."""
        return cls(_read(ca), _read(certificate), _read(key))

    def of_channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)

    def of_server(self) -> grpc.ServerCredentials:
        """Who shows no certificate of the CA's is refused before it can call anything."""
        return grpc.ssl_server_credentials([(self.key, self.certificate)], self.ca, require_client_auth=True)


class PeerTLS:
    """Mutual TLS by files: connections that begin after they changed are made with what is in them then."""

    def __init__(self, ca: Path, certificate: Path, key: Path) -> None:
        """Raises ConfigError for a file that cannot be read or is no PEM."""
        self._files = WatchedFiles((ca, certificate, key), partial(_checked, certificate, key))

    @property
    def version(self) -> int:
        self._files.look()
        return self._files.num_changes

    def of_channel(self) -> grpc.ChannelCredentials:
        ca, certificate, key = self._files.value
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def of_server(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            self._of_handshake(), self._of_handshake, require_client_authentication=True
        )

    def _of_handshake(self) -> grpc.ServerCertificateConfiguration:
        ca, certificate, key = self._files.value
        return grpc.ssl_server_certificate_configuration([(key, certificate)], ca)


class DoorTLS:
    """Of a port for clients, who show no certificate; read anew as PeerTLS."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises ConfigError for a file that cannot be read or is no PEM."""
        self._files = WatchedFiles((certificate, key), partial(_checked, certificate, key))
        self._certificate, self._key = certificate, key

    def of_server(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            self._of_handshake(), self._of_handshake, require_client_authentication=False
        )

    def _of_handshake(self) -> grpc.ServerCertificateConfiguration:
        certificate, key = self._files.value
        return grpc.ssl_server_certificate_configuration([(key, certificate)])

    def of_http(self) -> ssl.SSLContext:
        """Whose handshakes are made with what the files hold then."""
        context, version = self._context(), self._version()

        def at_handshake(connection: ssl.SSLObject, name: str | None, asked: ssl.SSLContext) -> None:
            nonlocal context, version
            if self._version() != version:
                context, version = self._context(), self._version()
            connection.context = context

        context.sni_callback = at_handshake
        return context

    def _version(self) -> int:
        self._files.look()
        return self._files.num_changes

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._certificate, self._key, password=_NO_PASSWORD)
        return context


@dataclass(frozen=True, slots=True)
class ClientTLS:
    """Of a client: which CA must have signed the server's certificate, in PEM."""

    ca: bytes
    version: int = 0

    @classmethod
    def read(cls, ca: Path) -> Self:
        """Raises ConfigError for a file that cannot be read or is no PEM."""
        return cls(_read(ca))

    def of_channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca)


def peer_tls(config: RoleConfig) -> PeerTLS | None:
    """As the role is set; None: what it says to other roles goes in the clear. Raises ConfigError."""
    return _peer_tls(config.peer_ca, config.peer_cert, config.peer_key)


def peer_tls_of(environ: Mapping[str, str] = os.environ) -> PeerTLS | None:
    """Of a command that speaks to nodes itself: it reads the variables that set the roles. Raises ConfigError."""
    return _peer_tls(*(environ.get(f"KVRELAY_PEER_{name}", "") for name in ("CA", "CERT", "KEY")))


def _peer_tls(ca: str, certificate: str, key: str) -> PeerTLS | None:
    named = {"peer_ca": ca, "peer_cert": certificate, "peer_key": key}
    if not any(named.values()):
        return None
    for name, path in named.items():
        if not path:
            raise ConfigError(f"{name} is missing: peer_ca, peer_cert and peer_key belong together")
    return PeerTLS(*(Path(path).expanduser() for path in (ca, certificate, key)))


def _checked(certificate: Path, key: Path, *texts: bytes) -> tuple[bytes, ...]:
    """The texts of a CA, if there is one, the certificate and the key. That the last two are no pair, gRPC would find
    only in handshakes, each of which fails."""
    if not all(map(_is_pem, texts)):
        raise ConfigError("one of the files of certificates and keys is not in PEM form")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_NO_PASSWORD)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{certificate} and {key} do not belong together, or cannot be read: {error}") from error
    return texts


def _read(path: Path) -> bytes:
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if not _is_pem(pem):
        raise ConfigError(f"{path} is not in PEM form")
    return pem


def _is_pem(text: bytes) -> bool:
    return b"-----BEGIN " in text
