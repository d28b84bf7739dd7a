"""Numbers of bytes, as they are written."""

from __future__ import annotations

import re

_BINARY_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, **_BINARY_UNITS}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes of "4096", "512MiB", "1.5 GiB" or "80GB" (decimal, as vendors count); raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    factor = SIZE_UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(text)
    return int(float(match[1]) * factor)


def show_size(num_bytes: int) -> str:
    """The shortest exact spelling: 536870912 is "512MiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = SIZE_UNITS[unit.upper()]
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)
