"""How a worker and the driver speak: one argument, then a line of JSON each way. Standard library only."""

from __future__ import annotations

import json
import sys
from typing import Any

from bench.engine.worker import own_stdout, say


class Conversation:
    """The worker's end. What its libraries print goes to standard error."""

    def __init__(self) -> None:
        self._report = own_stdout()
        self.task: dict[str, Any] = json.loads(sys.argv[1])

    def tell(self, **fields: object) -> None:
        say(self._report, fields)

    def next_order(self) -> dict[str, Any] | None:
        """What the driver wants next; None when it wants nothing more. Blocks."""
        line = sys.stdin.readline()
        if not line:
            return None
        order: dict[str, Any] = json.loads(line)
        return order
