"""When to stop asking a peer that fails, and when to try again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Circuit:
    """Closed: ask. Open: do not, for a while. Half-open: let one call through; its outcome decides.

    Opens after `threshold` failures in a row, for `first_open_s`, then twice as long each time a trial call fails, up
    to `max_open_s`. A trial that never reports back is given up after as long. Pure: the caller passes the time,
    monotonic seconds.
    """

    threshold: int = 2
    first_open_s: float = 1.0
    max_open_s: float = 30.0
    _num_failures: int = 0
    _open_s: float = 0.0  # how long it is open for; 0 while closed
    _next_trial_at: float = 0.0  # when the next trial may start

    @property
    def is_open(self) -> bool:
        """Also while half-open."""
        return self._open_s > 0.0

    def allows(self, now: float) -> bool:
        """Whether to make a call now. While half-open only the first one to ask may."""
        if not self.is_open:
            return True
        if now < self._next_trial_at:
            return False
        self._next_trial_at = now + self._open_s
        return True

    def succeeded(self) -> None:
        self._num_failures = 0
        self._open_s = 0.0

    def failed(self, now: float) -> bool:
        """Reports a failed call; True if this one opened the circuit."""
        self._num_failures += 1
        if self._num_failures < self.threshold:
            return False
        opened = not self.is_open
        self._open_s = self.first_open_s if opened else min(2 * self._open_s, self.max_open_s)
        self._next_trial_at = now + self._open_s
        return opened
