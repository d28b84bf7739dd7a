"""`kvrelay decode-node`: the configuration first, then all that computes."""

from __future__ import annotations

from collections.abc import Sequence

from decode_node.config import DecodeConfig
from kvrelay.rpc import process
from kvrelay.types import Role


def main(argv: Sequence[str] | None = None) -> int:
    return process.main(DecodeConfig, Role.DECODE_NODE, _load_app, argv)


def _load_app() -> process.MakeApp[DecodeConfig]:
    from decode_node.app import DecodeApp  # torch takes seconds, which a mistake in a flag need not wait for

    return DecodeApp
