"""`kvrelay weight`: a node's part of the requests, changed from the command line while it runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from kvrelay.client_command import address_argument, run, write
from kvrelay.errors import InvalidRequestError, UnavailableError
from kvrelay.limits import check_weight
from kvrelay.rpc.channel import OTHER_TLS, open_channel, speaks_other_tls
from kvrelay.rpc.credentials import peer_tls_of
from kvrelay.rpc.nodes import NodeClient


def main(argv: Sequence[str]) -> int:
    """Returns once the node has its new weight; 1 with one line on stderr when it could not be told."""
    options = parser().parse_args(argv)
    return run("weight", options.node, lambda: _set_weight(options))


async def _set_weight(options: argparse.Namespace) -> None:
    address = options.node
    async with open_channel(address, tls=peer_tls_of()) as channel:
        try:
            weight = await NodeClient(channel).set_weight(options.weight)
        except UnavailableError as error:
            if speaks_other_tls(error.message):
                raise UnavailableError(f"{address} {OTHER_TLS}") from error
            raise UnavailableError(f"no node answers at {address}; `kvrelay status` shows where they are") from error
    if options.json:
        write(json.dumps({"address": address, "weight": weight}) + "\n")
    else:
        write(f"{address} has weight {weight:g}{'' if weight else ': it takes nothing new'}\n")


def _weight_argument(text: str) -> float:
    try:
        weight = float(text)
        check_weight(weight)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
    except InvalidRequestError as error:
        raise argparse.ArgumentTypeError(error.message) from error
    return weight


def parser() -> argparse.ArgumentParser:
    description = (
        "Change a prefill or decode node's part of the requests beside other nodes' weights, until it is changed again "
        "or the node restarts. What runs there goes on."
    )
    parser = argparse.ArgumentParser(prog="kvrelay weight", description=description, allow_abbrev=False)
    parser.add_argument("node", type=address_argument, metavar="ADDRESS", help="the node's host:port")
    parser.add_argument(
        "weight",
        type=_weight_argument,
        metavar="VALUE",
        help="0 to 100; a node starts with its --weight, 1; 0: nothing new",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser
