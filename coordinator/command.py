"""`kvrelay coordinator`: what gRPC has to know before it is imported, then all that serves.

Left to itself gRPC moves bytes by its EventEngine, on threads of its own that each message wakes and that go to sleep
after it. Of the messages that nodes send, a step of all their answers each, that is a good part of the CPU time; so the
coordinator reads those without: one thread waits for all of these connections and does what is to be done. It needs the
interpreter for that as little as EventEngine's do, so pings are answered while the interpreter is busy. Its clients'
connections keep EventEngine: without it, a coordinator that writes as fast as one core can to a thousand clients does
not come to their pings within 2 s, and loses them (`python -m bench.coordinator --rows relay` shows it).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

EXPERIMENTS = "-event_engine_client"


def choose_io() -> None:
    """Before grpc is imported; later it changes nothing. The environment's own GRPC_EXPERIMENTS wins."""
    os.environ.setdefault("GRPC_EXPERIMENTS", EXPERIMENTS)


def main(argv: Sequence[str] | None = None) -> int:
    choose_io()
    from coordinator.main import main as serve

    return serve(argv)
