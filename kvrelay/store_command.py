"""`kvrelay store`: looks after the KV stores of a running cluster. Every command is safe on a store that serves."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from kvrelay.ask import add_cache_arguments
from kvrelay.client_command import add_address, refuse, run
from kvrelay.duration import duration_argument, show_duration
from kvrelay.errors import InvalidRequestError
from kvrelay.store_look import show_blocks, show_stats
from kvrelay.store_targets import addresses_argument, prefix_argument
from kvrelay.store_warm import warm
from kvrelay.store_work import compact, evict, pin, verify

DEFAULT_PIN_S = 3_600.0
MAX_PIN_S = 604_800.0  # a week, as a store allows


def main(argv: Sequence[str]) -> int:
    """With one line on stderr: 1 when something failed, 2 when the command line makes no sense."""
    options = parser().parse_args(argv)
    try:
        _check(options)
    except InvalidRequestError as error:
        return refuse(f"store {options.command}", error.message)
    return run(f"store {options.command}", options.address, lambda: options.work(options))


def _check(options: argparse.Namespace) -> None:
    if options.command == "evict" and not (
        options.tenant or options.model or options.prefix or options.older_than is not None
    ):
        raise InvalidRequestError("say which blocks: --tenant, --model, --prefix or --older-than, or several of them")
    if options.command == "ls" and (options.limit or 0) < 0:
        raise InvalidRequestError(f"--limit is {options.limit}; allowed is 0 (all) or more")
    if options.command == "pin" and options.duration > MAX_PIN_S:
        raise InvalidRequestError(f"--for is {show_duration(options.duration)}; allowed is a week at most")
    if options.command == "warm":
        _check_warm(options)


def _check_warm(options: argparse.Namespace) -> None:
    if not 1 <= options.concurrency <= 256:
        raise InvalidRequestError(f"--concurrency is {options.concurrency}; allowed is [1, 256]")
    if not 0 < options.timeout < math.inf:
        raise InvalidRequestError(f"--timeout is {options.timeout:g}; allowed is a length of time over 0")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvrelay store", description="Look after the KV stores of a running cluster.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    add_address(shared)
    shared.add_argument(
        "--store",
        type=addresses_argument,
        metavar="HOST:PORT,...",
        help="the stores; default: all that joined the coordinator",
    )
    shared.add_argument("--json", action="store_true", help="print JSON instead")

    def add(name: str, work: object, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, parents=[shared], help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        command.set_defaults(work=work)
        return command

    add("stats", show_stats, "what is held, and what was done since the start")
    add("verify", verify, "read and prove every block on disk; what fails is dropped")
    add("compact", compact, "make the disk tier's file as small as what it holds")
    _add_list(add("ls", show_blocks, "list what is held, a line for each chain of blocks; with --json for each block"))
    _add_evict(add("evict", evict, "drop the blocks that match all of what is given, pinned ones too"))
    _add_pin(add("pin", pin, "keep a block and those before it in its chain from eviction and expiry"))
    _add_warm(add("warm", warm, "compute the prefixes of prompts, and wait until a store holds them"))
    return parser


def _add_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", default="", metavar="NAME", help="only this tenant's blocks")
    _add_model(parser, "only blocks of this model")
    parser.add_argument("--blocks", action="store_true", help="a line for each block")
    parser.add_argument(
        "--limit", type=int, metavar="N", help="lines at most of each store; 0: all; default 50, with --json all"
    )


def _add_evict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", default="", metavar="NAME", help="blocks of this tenant")
    _add_model(parser, "blocks of this model, in whatever layout")
    parser.add_argument("--prefix", type=prefix_argument, metavar="HASH", help="this block and all that follow it")
    parser.add_argument(
        "--older-than", type=duration_argument, metavar="TIME", help="not used for longer than this: 90s, 5m, 1h, 2d"
    )


def _add_pin(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefix", type=prefix_argument, required=True, metavar="HASH", help="the last block to keep, as in ls"
    )
    parser.add_argument(
        "--for",
        dest="duration",
        type=duration_argument,
        default=DEFAULT_PIN_S,
        metavar="TIME",
        help="how long, a week at most; 0 unpins; default 1h",
    )


def _add_warm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        help='JSON lines, each with "text", "messages" or "token_ids", and if it differs from the flags with '
        '"cache_salt", "public_cache" or "cache_ttl"; "-" reads stdin',
    )
    parser.add_argument("--concurrency", type=int, default=4, metavar="N", help="prompts at a time; default 4")
    parser.add_argument(
        "--wait", type=duration_argument, default=30.0, metavar="TIME", help="for a store to have it; default 30s"
    )
    parser.add_argument(
        "--timeout", type=duration_argument, default=600.0, metavar="TIME", help="of one prompt; default 600s"
    )
    add_cache_arguments(parser)


def _add_model(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--model", default="", metavar="NAME", help=f"{text}: its served name, or its fingerprint")
