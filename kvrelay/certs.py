"""`kvrelay certs`: a CA and certificates for every role."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kvrelay.certificates import CA_DAYS, make_certificates


def main(argv: Sequence[str]) -> int:
    """Raises ConfigError."""
    options = parser().parse_args(argv)
    names = make_certificates(options.directory, options.host, options.days)
    where = options.directory
    if options.json:
        sys.stdout.write(json.dumps({"directory": str(where), "names": list(names)}) + "\n")
        return 0
    sys.stdout.write(
        f"{where}: {', '.join(names)}, signed by ca.pem. Keep ca.key to yourself: who has it can join as a node.\n"
        f"  a role:         --peer-ca {where}/ca.pem --peer-cert {where}/ROLE.pem --peer-key {where}/ROLE.key\n"
        f"  clients' port:  --tls-cert {where}/door.pem --tls-key {where}/door.key\n"
        f"  a client:       KVRELAY_CA={where}/ca.pem\n"
    )
    return 0


def parser() -> argparse.ArgumentParser:
    description = (
        "Makes a CA, and a certificate for each role and for the clients' port, in DIR. Where DIR has a CA it signs "
        "new certificates, which processes that run take up by themselves. For development and small clusters: the "
        "CA's key lies in DIR."
    )
    parser = argparse.ArgumentParser(prog="kvrelay certs", description=description, allow_abbrev=False)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="HOST",
        help="a name or address that roles are reached by, beside loopback; may be repeated",
    )
    parser.add_argument(
        "--days", type=int, default=365, metavar="N", help=f"how long they hold (default: 365, at most: {CA_DAYS})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser
