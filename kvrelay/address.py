"""Where a process listens, as it is written."""

from __future__ import annotations

REDIS_SCHEME = "redis://"  # of a kvstore that is a Redis or Valkey server
MAX_PORT = 65_535


def is_address(text: str) -> bool:
    """Whether it is one host:port."""
    host, _, port = text.rpartition(":")
    is_more = any(char in ",;/" or char.isspace() for char in host)  # a list, or a URL
    return bool(host) and not is_more and port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT


def check_address(text: str) -> None:
    """Raises ValueError unless it is one, or empty."""
    if text and not is_address(text):
        raise ValueError(text)


def check_store(text: str) -> None:
    """Raises ValueError unless it is where a kvstore is: host:port or redis://host:port."""
    address = text.removeprefix(REDIS_SCHEME)
    if not address:
        raise ValueError(text)
    check_address(address)
