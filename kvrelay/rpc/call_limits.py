"""How much a call may send in one message, and how long it may take. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class CallLimits:
    """0 sets no bound. The time is the server's own: a caller's deadline, if it has one, may end the call sooner."""

    max_bytes: int = 0  # of its request, where that is a single message
    max_s: float = 0.0  # from its first byte to its last

    def check_bytes(self, method: str, num_bytes: int) -> None:
        """Raises InvalidRequestError."""
        if self.max_bytes and num_bytes > self.max_bytes:
            name = method.rpartition("/")[2]
            raise InvalidRequestError(f"the request has {num_bytes} bytes; {name} takes at most {self.max_bytes}")


NO_LIMITS = CallLimits()
LimitsOf = Callable[[str], CallLimits]  # by full method name
