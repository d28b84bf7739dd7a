"""What `kvrelay up --secure` makes before it starts anything: certificates, and an API key for whoever started it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coordinator.api_keys import new_key
from coordinator.identity import Scope
from kvrelay.certificates import DOOR, make_certificates
from kvrelay.errors import ConfigError
from kvrelay.types import DEFAULT_TENANT, Role

_KEY_ID = "up"
_EVERYWHERE = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True)
class Locks:
    directory: Path
    api_key: str

    @property
    def ca(self) -> Path:
        return self.directory / "ca.pem"

    def flags(self, role: Role) -> list[str]:
        flags = ["--peer-ca", str(self.ca)]
        flags += ["--peer-cert", str(self.directory / f"{role.value}.pem")]
        flags += ["--peer-key", str(self.directory / f"{role.value}.key")]
        if role is Role.COORDINATOR:
            flags += [
                "--tls-cert",
                str(self.directory / f"{DOOR}.pem"),
                "--tls-key",
                str(self.directory / f"{DOOR}.key"),
            ]
            flags += ["--api-keys-file", str(_keys_file(self.directory))]
        return flags


def lock(directory: Path, host: str) -> Locks:
    """New certificates for `host`, of the CA that the directory has or gets, and a new key beside those that were added
    to its file. Raises ConfigError."""
    make_certificates(directory, [] if host in _EVERYWHERE else [host])
    key, line = new_key(DEFAULT_TENANT, _KEY_ID, frozenset(Scope))
    file = _keys_file(directory)
    try:
        before = file.read_bytes().splitlines() if file.exists() else []
        others = [other for other in before if not other.startswith(f"{_KEY_ID} = ".encode())]
        file.write_bytes(b"\n".join((*others, line.encode(), b"")))
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}") from error
    return Locks(directory, key)


def _keys_file(directory: Path) -> Path:
    return directory / "keys.toml"
