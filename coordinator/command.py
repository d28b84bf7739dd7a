"""`kvrelay coordinator`: what gRPC has to know before it is imported, then all that serves.

Left to itself gRPC moves bytes by its EventEngine, on threads of its own that each message wakes and that go to sleep
after it: with small messages to many clients that is a third of the CPU time and more. Without it one thread waits for
all connections and does what is to be done. It needs the interpreter for that as little as those do, so pings are
answered while the interpreter is busy. Where much KV moves, which is not here, EventEngine's threads are worth it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

EXPERIMENTS = "-event_engine_client,-event_engine_listener"


def choose_io() -> None:
    """Before grpc is imported; later it changes nothing. The environment's own GRPC_EXPERIMENTS wins."""
    os.environ.setdefault("GRPC_EXPERIMENTS", EXPERIMENTS)


def main(argv: Sequence[str] | None = None) -> int:
    choose_io()
    from coordinator.main import main as serve

    return serve(argv)
