"""Certificates for tests and benchmarks on one machine: a CA of their own, and one it signed for loopback.

    python scripts/development_certificates.py DIRECTORY

They are for nothing else: the CA's key lies beside them. Needs the `openssl` command, version 3.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

DAYS = 30
ALTERNATIVE_NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1"
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", str(DAYS))
TIMEOUT_S = 30.0


class CertificatesError(Exception):
    """They could not be made; the message says why."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files. One certificate serves both sides of a connection."""

    ca: Path
    certificate: Path
    key: Path


def have_openssl() -> bool:
    return shutil.which("openssl") is not None


def make_certificates(directory: Path, name: str = "kvrelay development") -> CertificateFiles:
    """Writes them into `directory`, under their names in it. Raises CertificatesError."""
    files = CertificateFiles(directory / "ca.pem", directory / "node.pem", directory / "node.key")
    ca_key = directory / "ca.key"
    _openssl("-keyout", ca_key, "-out", files.ca, "-subj", f"/CN={name} CA")
    _openssl(
        *("-CA", files.ca, "-CAkey", ca_key, "-keyout", files.key, "-out", files.certificate),
        *("-subj", f"/CN={name}", "-addext", ALTERNATIVE_NAMES, "-addext", "basicConstraints=critical,CA:FALSE"),
    )
    return files


def _openssl(*arguments: str | Path) -> None:
    if not have_openssl():
        raise CertificatesError("there is no openssl command; install OpenSSL 3")
    command: list[str | Path] = ["openssl", "req", "-x509", *_NEW_KEY, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise CertificatesError(f"openssl ended with {done.returncode}: {done.stderr.strip()[-500:]}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    make_certificates(target)
