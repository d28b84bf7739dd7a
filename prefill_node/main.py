"""`kvrelay prefill-node`: the configuration first, then all that computes."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.rpc import process
from kvrelay.types import Role
from prefill_node.config import PrefillConfig


def main(argv: Sequence[str] | None = None) -> int:
    return process.main(PrefillConfig, Role.PREFILL_NODE, _load_app, argv)


def _load_app() -> process.MakeApp[PrefillConfig]:
    from prefill_node.app import PrefillApp  # torch takes seconds, which a mistake in a flag need not wait for

    return PrefillApp
