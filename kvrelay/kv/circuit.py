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
    _next_trial_at: float = 0.0
    _on_trial: bool = False

    @property
    def is_open(self) -> bool:
        """Also while half-open."""
        return self._open_s > 0.0

    def blocks(self, now: float) -> bool:
        """Whether a call made now would not be allowed; asking changes nothing."""
        return self.is_open and now < self._next_trial_at

    def allows(self, now: float) -> bool:
        """Whether to make a call now. While half-open only the first one to ask may."""
        if self.blocks(now):
            return False
        if not self.is_open:
            return True
        self._next_trial_at = now + self._open_s
        self._on_trial = True
        return True

    def withdraw(self, now: float) -> None:
        """A call ended without an outcome: if it was the trial, the next one to ask may make it."""
        if self._on_trial:
            self._on_trial = False
            self._next_trial_at = now

    def succeeded(self) -> None:
        self._num_failures = 0
        self._open_s = 0.0
        self._on_trial = False

    def failed(self, now: float) -> bool:
        """Reports a failed call; True if this one opened the circuit."""
        if self.is_open:
            self._fail_trial(now)
            return False
        self._num_failures += 1
        if self._num_failures < self.threshold:
            return False
        self._open(self.first_open_s, now)
        return True

    def _fail_trial(self, now: float) -> None:
        """Calls that were under way when it opened fail too, and say nothing new."""
        if self._on_trial:
            self._on_trial = False
            self._open(min(2 * self._open_s, self.max_open_s), now)

    def _open(self, open_s: float, now: float) -> None:
        self._open_s = open_s
        self._next_trial_at = now + open_s
