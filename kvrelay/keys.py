"""`kvrelay keys new`: an API key for a client, and the line by which the coordinator knows it."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from coordinator.api_keys import new_key, parse_keys
from coordinator.identity import Scope
from kvrelay.duration import MAX_TTL_S, duration_argument
from kvrelay.errors import ConfigError

_MODE = 0o600  # whoever may write to the file may let anyone in
_SCOPES = ", ".join(scope.value for scope in Scope)


def main(argv: Sequence[str]) -> int:
    """Raises ConfigError."""
    options = parser().parse_args(argv)
    lasts_s = options.expires_in
    expires = None if lasts_s is None else datetime.now(UTC) + timedelta(seconds=lasts_s)
    key, line = new_key(options.tenant, options.id or secrets.token_hex(4), options.scopes, expires, options.max_open)
    if options.file is not None:
        _append(options.file, line)
    if options.json:
        sys.stdout.write(json.dumps({"key": key, "line": line}) + "\n")
    elif options.file is not None:
        sys.stdout.write(f"{key}\n")
    else:
        sys.stderr.write("# The line for --api-keys-file, then the key, which is shown this once:\n")
        sys.stdout.write(f"{line}\n{key}\n")
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvrelay keys", description="Makes API keys.", allow_abbrev=False)
    new = parser.add_subparsers(required=True, metavar="new").add_parser(
        "new",
        allow_abbrev=False,
        help="make a key",
        description="Makes a key and prints it, which is the only time that it is seen: the file has a hash of it. To "
        "end one, delete its line; a coordinator sees that at once.",
    )
    new.add_argument("--tenant", required=True, metavar="NAME", help="whose requests it makes them")
    new.add_argument("--id", default="", metavar="ID", help="what logs call the key (default: eight random digits)")
    new.add_argument("--scopes", type=_scopes_argument, default="infer", metavar="SCOPE,...", help=_scopes_help())
    new.add_argument("--expires-in", type=_lasts_argument, metavar="TIME", help="such as 90d (default: never)")
    new.add_argument(
        "--max-open", type=int, default=0, metavar="N", help="answers it may have waiting or computed (default: any)"
    )
    new.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help="the coordinators' --api-keys-file: the line is added to it, not printed",
    )
    new.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def _scopes_help() -> str:
    return f"what it may do, of {_SCOPES}: ask, and see the whole cluster (default: infer)"


def _scopes_argument(text: str) -> frozenset[Scope]:
    try:
        return frozenset(Scope(one.strip()) for one in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed are {_SCOPES}, or both with a comma between") from error


def _lasts_argument(text: str) -> float:
    seconds = duration_argument(text)
    if not 1.0 <= seconds <= MAX_TTL_S:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range; 1s to 3650d are allowed")
    return seconds


def _append(path: Path, line: str) -> None:
    """In one write, so that a coordinator reads all of the line or none. What would not be read is not written."""
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, _MODE), "r+b", buffering=0) as file:
            before = file.read()
            added = (b"" if not before or before.endswith(b"\n") else b"\n") + line.encode() + b"\n"
            parse_keys(before + added)
            file.write(added)
    except OSError as error:
        raise ConfigError(f"cannot write to {path}: {error.strerror}") from error
