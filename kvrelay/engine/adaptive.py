"""How much one step takes on, learned from how long those wait who come while a step runs. Pure; told the time.

A newcomer waits for the end of the step that runs, so long steps make long waits, and short ones waste what is the same
for every step. The bound shrinks by a quarter while newcomers wait for more than the high mark, grows by a sixteenth of
the most while they wait for less than the low one, and stays in between. Nothing is ever held back to fill a step: what
is there when a step begins is in it, so the first request of an idle node waits for nobody.
"""

from __future__ import annotations

from kvrelay.limits import QueueMarks

SHRINK = 0.75
GROW = 1 / 16
LEAST_SHARE = 1 / 1024
SMOOTHING = 0.25  # of a new wait in the mean of the last ones
STEPS_ALONE = 16  # full steps that nobody waited for count as one newcomer that did not wait


class AdaptiveBound:
    """A share of some most, which is told each time since it may be replaced. Begins with all of it."""

    def __init__(self, marks: QueueMarks, least: int = 1) -> None:
        """`least` is what the bound never falls below, where the most is not less."""
        self._marks = marks
        self._least = least
        self._share = 1.0
        self._wait_s = 0.0  # mean of the last newcomers'
        self._is_used = False  # since it was last set: a step was as large as it allowed
        self._num_alone = 0  # such steps since somebody waited

    def of(self, most: int) -> int:
        """The bound now, where `most` is the limit."""
        return max(min(self._least, most), int(most * self._share))

    def waited(self, seconds: float) -> None:
        """A newcomer waited so long for the step that ran."""
        self._num_alone = 0
        self._wait_s += SMOOTHING * (seconds - self._wait_s)
        if self._wait_s > self._marks.high_s:
            self.shrink()
            self._wait_s *= SHRINK  # what those steps would have made it
        elif self._wait_s < self._marks.low_s and self._is_used:
            self.grow()

    def stepped(self, *, is_full: bool) -> None:
        """A step ended; `is_full`: the bound kept something out of it."""
        if not is_full:
            return
        self._is_used = True
        self._num_alone += 1
        if self._num_alone >= STEPS_ALONE:
            self.waited(0.0)

    def shrink(self) -> None:
        """By a quarter."""
        self._set(self._share * SHRINK)

    def shrink_below(self, used: int, most: int) -> None:
        """A quarter below what a step had; once, however many steps still have it."""
        self._set(min(self._share, SHRINK * used / most))

    def grow(self) -> None:
        """By a sixteenth of the most."""
        self._set(self._share + GROW)

    def _set(self, share: float) -> None:
        self._share = min(1.0, max(LEAST_SHARE, share))
        self._is_used = False
