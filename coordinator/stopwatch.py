"""Time that runs only while something is so. Pure: told the time, in seconds of any clock."""

from __future__ import annotations


class Stopwatch:
    def __init__(self) -> None:
        self._before_s = 0.0  # of earlier runs
        self._since: float | None = None

    @property
    def runs(self) -> bool:
        return self._since is not None

    def start(self, now: float) -> None:
        """Does nothing while it runs."""
        if self._since is None:
            self._since = now

    def stop(self, now: float) -> None:
        self._before_s = self.elapsed(now)
        self._since = None

    def elapsed(self, now: float) -> float:
        """Seconds that it has run, in all."""
        return self._before_s + (0.0 if self._since is None else max(0.0, now - self._since))
