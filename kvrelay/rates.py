"""How fast work goes, from how long pieces of it took lately. Plain data; durations in seconds, no clock.

Only time spent at work is given in here, so a node that idles for an hour is known as well afterwards as before.
"""

from __future__ import annotations

import math

HALF_TOKENS = 2048  # what rates of computing prompts look back on
HALF_BYTES = 64 * 2**20  # what rates of moving KV look back on
FORGET = 0.98  # weight of all earlier samples of a line beside the next one: about the last fifty count
SPREAD = 0.25  # variance of x, a count, from which samples tell more of a line's slope than what was known before
OUTLIER = 4.0  # a piece counts with at most so many times what the others say: a pause is not the work's
SMALL = 1 / 16  # of a rate's half amount: a smaller piece may take as long as that for reasons of its own
NUM_TRUSTED = 8  # samples from which on there is a line to hold the next one against


class WorkRate:
    """Units of work in a second. Old work counts less the more was done since, however long ago it was."""

    def __init__(self, half_amount: float) -> None:
        """What was done before the last `half_amount` units counts half."""
        self._half_amount = half_amount
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """`amount` took `seconds`. What is not above 0, or no number, says nothing."""
        if not (0 < amount < math.inf and 0 < seconds < math.inf):
            return
        if self._amount > self._half_amount:
            seconds = min(seconds, OUTLIER * max(amount, SMALL * self._half_amount) / self.per_s)
        kept = 0.5 ** (amount / self._half_amount)
        self._amount = kept * self._amount + amount
        self._seconds = kept * self._seconds + seconds

    @property
    def per_s(self) -> float:
        """0 while nothing was done."""
        return self._amount / self._seconds if self._seconds else 0.0


class Line:
    """The line nearest to the last samples, y = base + slope x, neither of which is ever below 0.

    Least squares with exponential forgetting. Where x hardly varies, as with a batch that stays the same, the slope
    stays what it was and the base follows.
    """

    def __init__(self, slope: float = 0.0, spread: float = SPREAD) -> None:
        """`slope` is what to believe before x has varied, which is by a variance of `spread` or more."""
        self._spread = spread
        self.base = 0.0
        self.slope = slope
        self.num_samples = 0
        self._weight = 0.0
        self._mean_x = 0.0
        self._mean_y = 0.0
        self._var_x = 0.0
        self._cov = 0.0

    def at(self, x: float) -> float:
        """y; 0 while there is no sample."""
        return self.base + self.slope * x if self.num_samples else 0.0

    def add(self, x: float, y: float) -> None:
        """A sample, both at least 0. What is not, or no number, is left out."""
        if not (0 <= x < math.inf and 0 <= y < math.inf):
            return
        if self.num_samples >= NUM_TRUSTED and self.at(x) > 0:
            y = min(y, OUTLIER * self.at(x))
        self.num_samples += 1
        self._weight = FORGET * self._weight + 1.0
        part = 1.0 / self._weight
        dx, dy = x - self._mean_x, y - self._mean_y
        self._mean_x += part * dx
        self._mean_y += part * dy
        self._var_x = (1 - part) * (self._var_x + part * dx * dx)
        self._cov = (1 - part) * (self._cov + part * dx * dy)
        slope = (self._cov + self._spread * self.slope) / (self._var_x + self._spread)
        # A base below 0 is none: the line through the origin then. A slope of no more than that keeps the mean.
        most = self._mean_y / self._mean_x if self._mean_x > 0 else slope
        self.slope = min(max(0.0, slope), most)
        self.base = max(0.0, self._mean_y - self.slope * self._mean_x)
