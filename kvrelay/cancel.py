"""`kvrelay cancel`: ends a running request from the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from kvrelay.client import AsyncClient
from kvrelay.client_command import make_parser, run, write
from kvrelay.errors import NotFoundError


def main(argv: Sequence[str]) -> int:
    """Returns once the coordinator has ended the request; 1 with one line on stderr when no such request runs."""
    options = parser().parse_args(argv)
    return run("cancel", options.address, lambda: _cancel(options))


async def _cancel(options: argparse.Namespace) -> None:
    async with AsyncClient(options.address) as client:
        try:
            await client.cancel(options.request_id)
        except NotFoundError as error:
            where = f"at {options.address}; another coordinator may have it"
            raise NotFoundError(f"{error.message} {where}") from error
    told = {"request_id": options.request_id, "state": "cancelled"}
    write(f"{json.dumps(told) if options.json else f'cancelled {options.request_id}'}\n")


def parser() -> argparse.ArgumentParser:
    parser = make_parser("cancel", "End a running request and free everything it holds; its caller is told.")
    parser.add_argument("request_id", metavar="ID", help="its id: what `kvrelay ask --request-id` or a client gave it")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser
