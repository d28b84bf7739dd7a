"""What the commands that ask a running coordinator share: its address, errors as one line, numbers for people."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from kvrelay.address import is_address
from kvrelay.errors import (
    DeadlineError,
    InvalidRequestError,
    KVRelayError,
    UnauthenticatedError,
    UnavailableError,
)

DEFAULT_ADDRESS = "127.0.0.1:7400"
EXIT_FAILED = 1
EXIT_USAGE = 2  # the command line made no sense; nothing was asked
EXIT_INTERRUPTED = 130


def make_parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"kvrelay {command}", description=description, allow_abbrev=False)
    add_address(parser)
    return parser


def add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        "--coordinator",
        type=addresses_argument,
        default=os.environ.get("KVRELAY_ADDRESS", DEFAULT_ADDRESS),
        metavar="HOST:PORT",
        help=f"of the coordinator, or several with commas between; default: KVRELAY_ADDRESS, else {DEFAULT_ADDRESS}",
    )


def check_timeout(timeout_s: float | None) -> None:
    """Of --timeout. Raises InvalidRequestError."""
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise InvalidRequestError(f"--timeout is {timeout_s:g}; allowed is a number of seconds over 0")


def address_argument(text: str) -> str:
    """One host:port, for argparse."""
    if not is_address(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no address; give host:port, such as {DEFAULT_ADDRESS}")
    return text


def addresses_argument(text: str) -> str:
    """One host:port, or several with commas between, for argparse."""
    return ",".join(address_argument(address.strip()) for address in text.split(","))


def run(command: str, address: str, work: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """The exit status of `work`; what went wrong is one line on stderr that names `command`."""
    return run_blocking(command, address, lambda: asyncio.run(work()))


def run_blocking(command: str, address: str, work: Callable[[], None]) -> int:
    """As `run`, of what has no event loop."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        work()
    except KVRelayError as error:
        return _fail(command, explain_failure(error, address))
    except BrokenPipeError:
        sys.stderr.close()  # else the interpreter complains of stdout when it exits
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def explain_failure(error: KVRelayError, address: str) -> str:
    """In words of who called, where gRPC's own say less."""
    said = error.message.lower()
    if isinstance(error, UnauthenticatedError):
        return f"{error.message}; commands take the key or the token from KVRELAY_API_KEY"
    if isinstance(error, UnavailableError) and "failed parsing http/2" in said:
        return f"what answers at {address} speaks no gRPC; name the coordinator's gRPC port by --address, not HTTP's"
    if isinstance(error, UnavailableError) and "wrong_version_number" in said:
        return f"what answers at {address} does not speak TLS; unset KVRELAY_CA, or name another by --address"
    if isinstance(error, UnavailableError) and "tls handshake failed" in said:
        return f"{address} shows a certificate that is not for it, or not of the CA in KVRELAY_CA ({error.message})"
    if isinstance(error, UnavailableError) and "failed to connect" in said and "socket closed" in said:
        return f"{address} closes the connection; if it speaks TLS, name the CA of its certificate by KVRELAY_CA"
    if isinstance(error, UnavailableError) and ("failed to connect" in said or "errors resolving" in said):
        return f"no coordinator answers at {address}; start a cluster with `kvrelay up`, or name it by --address"
    if isinstance(error, DeadlineError) and "deadline exceeded" in said:  # of this side: the coordinator had no say
        return f"no whole answer from {address} in the time given"
    return error.message


def refuse(command: str, reason: str) -> int:
    """The exit status of a command line that makes no sense, after a line on stderr that says why."""
    _fail(command, reason)
    return EXIT_USAGE


def _fail(command: str, reason: str) -> int:
    sys.stderr.write(f"kvrelay {command}: {reason}\n")
    return EXIT_FAILED


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def size(num_bytes: int) -> str:
    """Rounded for people: "0 B", "1.4 MiB"."""
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{num_bytes} B" if size == num_bytes else f"{size:.1f} {units[0]}"
