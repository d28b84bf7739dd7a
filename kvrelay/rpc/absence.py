"""What of a coordinator that cannot be joined is worth a line in the log.

One that is not up yet, or ends in good order, is nothing to worry about; one that stays away is, and so is a refusal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvrelay.errors import CancelledError, DeadlineError, KVRelayError, UnavailableError

PATIENCE_S = 5.0  # a coordinator loads its tokenizer in less

_OUT_OF_REACH = (UnavailableError, DeadlineError, CancelledError)

Line = tuple[int, str]  # a level of logging, and the words


class Absence:
    """From a failure to join to the next success. `now` is a monotonic clock in seconds."""

    def __init__(self, address: str, now: Callable[[], float]) -> None:
        self._address = address
        self._now = now
        self._since: float | None = None  # None: joined, or never tried
        self._warned_of: type[KVRelayError] | str = ""  # what was said last; each is said once

    def over(self) -> None:
        self._since = None
        self._warned_of = ""

    def failed(self, error: KVRelayError, *, was_joined: bool) -> Line | None:
        """What to log of an attempt that ended with `error`; `was_joined` tells that it had been accepted before."""
        begins, now = self._since is None, self._now()
        self._since = now if self._since is None else self._since
        if not isinstance(error, _OUT_OF_REACH):
            words = f"the coordinator at {self._address} refuses this node: {error.message}"
            return self._warn(error.message, words)
        if begins and was_joined:
            return logging.INFO, f"the coordinator at {self._address} is gone; joining again as soon as it is back"
        if begins:
            return logging.INFO, f"the coordinator at {self._address} does not answer yet; trying until it does"
        away_s = now - self._since
        if away_s < PATIENCE_S:
            return None
        words = f"not joined to the coordinator at {self._address} for {away_s:.0f} s, still trying: {error.message}"
        return self._warn(UnavailableError, words)

    def _warn(self, what: type[KVRelayError] | str, words: str) -> Line | None:
        if what == self._warned_of:
            return None
        self._warned_of = what
        return logging.WARNING, words
