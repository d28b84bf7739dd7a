"""Certificates of a CA of one's own: for development, and for clusters small enough to keep its key in a file.

A role's certificate is for both ends of a connection. The clients' port has another one, for servers only: whoever gets
hold of its key cannot join the cluster with it.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvrelay.errors import ConfigError
from kvrelay.types import Role

LOOPBACK = ("localhost", "127.0.0.1", "::1")
DOOR = "door"  # of the clients' port
CA_DAYS = 3_650  # and of a certificate at most
_SLACK = timedelta(minutes=5)  # for clocks that are behind
_BOTH_ENDS = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
# A CA without it is refused by strict verification (RFC 5280, section 4.2.1.3), which is Python's own from 3.13 on.
_USE_OF_CA = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)
_USES = {**{role.value: _BOTH_ENDS for role in Role}, DOOR: (ExtendedKeyUsageOID.SERVER_AUTH,)}


def make_certificates(directory: Path, hosts: Sequence[str] = (), days: int = 365) -> list[str]:
    """Writes ca.pem, and NAME.pem and NAME.key for each role and the clients' port; the names. Certificates are for
    loopback and `hosts`. A CA that is there signs them; else a new one is made.

    Raises ConfigError for `days` out of range, a host that is none, a directory that cannot be used, or a CA in it that
    cannot.
    """
    if not 1 <= days <= CA_DAYS:
        raise ConfigError(f"days is {days}; allowed is 1 to {CA_DAYS}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / "ca.key").exists():
            _make_ca(directory)
        ca_key = _load_key(directory / "ca.key")
        ca = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
        for name, uses in _USES.items():
            _make_one(directory, name, (*LOOPBACK, *hosts), days, ca, ca_key, uses)
    except OSError as error:
        raise ConfigError(f"cannot use {error.filename or directory}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"the CA in {directory} cannot be used: {error}") from error
    return list(_USES)


def _make_ca(directory: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvrelay CA")])
    ca = (
        _valid(CA_DAYS)
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_USE_OF_CA, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(directory / "ca.pem", ca.public_bytes(serialization.Encoding.PEM))
    _write_key(directory / "ca.key", key)


def _make_one(
    directory: Path,
    name: str,
    hosts: Sequence[str],
    days: int,
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    uses: Sequence[x509.ObjectIdentifier],
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _valid(days)
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"kvrelay {name}")]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .add_extension(x509.SubjectAlternativeName([_host_name(host) for host in dict.fromkeys(hosts)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    _write_key(directory / f"{name}.key", key)
    _write(directory / f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM))


def _valid(days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _SLACK).not_valid_after(now + timedelta(days=days))


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not host or not host.isascii():
        raise ConfigError(f"a host is {host!r}; allowed is an address, or a name in ASCII (xn--... for others)")
    return x509.DNSName(host)


def _load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path.name} is no EC key")
    return key


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _write(path, pem, 0o600)


def _write(path: Path, pem: bytes, mode: int = 0o644) -> None:
    """In one step: a process that reads it anew sees the old file or the new one."""
    part = path.with_name(f".{path.name}.new")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(pem)
    part.replace(path)
