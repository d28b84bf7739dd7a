"""Where a prompt's blocks that are computed, from the front, and those that are loaded, from the back, meet.

Loading the last ones saves most: a token costs more to compute the more there are before it. The engine thread
computes and the event loop loads, so a lock keeps the two out of each other's blocks; it is held for the time that one
slab takes to be copied, and asked for once a step.

Jin et al., "Compute Or Load KV Cache? Why Not Both?" (2024), fill a cache from both ends like this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

MIN_CLAIM_BLOCKS = 8  # a step of fewer tokens than they have is no cheaper


class Meeting:
    """Of the blocks [first, end) of a prompt, which may be loaded. Those before are here; what follows is computed."""

    def __init__(self, first: int, end: int) -> None:
        self.first = first
        self.end = end
        self.loaded_from = end  # the first of those that are loaded; final once the two have met
        self._computed_to = first  # where the engine has nothing to do with the blocks yet
        self._lock = threading.Lock()

    @property
    def num_loaded(self) -> int:
        return self.end - self.loaded_from

    @property
    def is_met(self) -> bool:
        """Nothing is left to load."""
        return self._computed_to >= self.loaded_from

    def shorten(self, end: int) -> None:
        """Only blocks before `end` will be loaded, as it turned out; none is yet."""
        with self._lock:
            self.end = self.loaded_from = min(end, self.end)

    def load(self, write: Callable[[int], None]) -> bool:
        """Has the next block, the one before those loaded so far, filled by `write`, which is given its index.

        False, and nothing is written, when that block is the engine's.
        """
        with self._lock:
            if self._computed_to >= self.loaded_from:
                return False
            write(self.loaded_from - 1)
            self.loaded_from -= 1
            return True

    def compute(self, end: int) -> int:
        """Claims the blocks before `end` for computing; returns where that stops: at `end`, or at the first loaded.

        While blocks come it stops half-way to them, for one step that took all would leave nothing to load.
        """
        with self._lock:
            if self.loaded_from < self.end:
                half = (self.loaded_from - self._computed_to) // 2
                end = min(end, self._computed_to + max(half, MIN_CLAIM_BLOCKS), self.loaded_from)
            self._computed_to = max(self._computed_to, min(end, self.end))
            return end
