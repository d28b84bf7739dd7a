"""Mutual TLS between processes: each side shows a certificate, and each asks for one that its CA has signed.

The name a certificate is checked for is the host of the address that was dialled, so it must be among the
certificate's subject alternative names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc

from kvrelay.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MutualTLS:
    """PEM texts of one process. Which of them do not fit together is found by whoever listens or dials with them."""

    ca: bytes  # the only one that may have signed the other side's certificate
    certificate: bytes  # this side's, with what lies between it and the CA, if anything does
    key: bytes = field(repr=False)

    @classmethod
    def read(cls, ca: Path, certificate: Path, key: Path) -> Self:
        """Raises ConfigError for a file that cannot be read or is no PEM."""
        return cls(_read(ca), _read(certificate), _read(key))

    def of_channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)

    def of_server(self) -> grpc.ServerCredentials:
        """Who shows no certificate of the CA's is refused before it can call anything."""
        return grpc.ssl_server_credentials([(self.key, self.certificate)], self.ca, require_client_auth=True)


def _read(path: Path) -> bytes:
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if b"-----BEGIN " not in pem:
        raise ConfigError(f"{path} is not in PEM form")
    return pem
