"""How often blocks are used again, by their place in a chain: what is hardly ever is not worth a place on disk."""

from __future__ import annotations

from dataclasses import dataclass

MAX_BUCKET = 17  # chains have 65,536 blocks at most
MIN_STORED = 1024  # blocks of a bucket before it is judged
WINDOW = 65_536  # blocks of a bucket; then what was counted counts half
# Blocks (of all buckets) that are stored before those stored now are judged: prompts come back after minutes.
EPOCH = 16_384
# Of every so many blocks asked about, the first few are worth it whatever was measured: what is not stored is not
# measured, and might have changed.
EXPLORE_EVERY = 16_384
EXPLORE = 1024


@dataclass(slots=True)
class _Bucket:
    num_young: int = 0  # stored in this epoch: it is too early to miss their reuse
    num_stored: float = 0.0  # before
    num_reused: float = 0.0  # of both, so that the rate errs on the side of storing

    def age(self) -> None:
        self.num_stored += self.num_young
        self.num_young = 0
        if self.num_stored >= WINDOW:
            self.num_stored /= 2
            self.num_reused /= 2


class Reuse:
    """Buckets by powers of two: first blocks, second ones, places 2 and 3, 4 to 7, and so on.

    From the place on from which blocks are used again less often than `threshold` (a share, in [0, 1]), they are not
    worth storing. 0: everything is.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._buckets = [_Bucket() for _ in range(MAX_BUCKET + 1)]
        self._num_asked = 0
        self._num_stored = 0
        self._limit = MAX_BUCKET  # the last bucket that is worth it

    def stored(self, chain_index: int) -> None:
        """A block that was not held was put, and was worth it."""
        self._buckets[_bucket_of(chain_index)].num_young += 1
        self._num_stored += 1
        if self._num_stored % EPOCH == 0:
            for bucket in self._buckets:
                bucket.age()
            self._limit = self._last_worthy()

    def reused(self, chain_index: int) -> None:
        """A block that had been stored was hit for the first time."""
        self._buckets[_bucket_of(chain_index)].num_reused += 1

    def rate(self, chain_index: int) -> float:
        """Share of the bucket's blocks that were used again; 1 until enough were stored to tell."""
        return self._rate(self._buckets[_bucket_of(chain_index)])

    def worth(self, chain_index: int) -> bool:
        """Whether a block that is about to be stored is worth it. Asked once for each."""
        exploring = self._num_asked % EXPLORE_EVERY < EXPLORE
        self._num_asked += 1
        return exploring or _bucket_of(chain_index) <= self._limit

    def _rate(self, bucket: _Bucket) -> float:
        return min(1.0, bucket.num_reused / bucket.num_stored) if bucket.num_stored >= MIN_STORED else 1.0

    def _last_worthy(self) -> int:
        """The deepest bucket with a good enough rate: what comes before it is needed by it."""
        judged = [bucket.num_stored >= MIN_STORED for bucket in self._buckets]
        worthy = [number for number, bucket in enumerate(self._buckets) if self._rate(bucket) >= self._threshold]
        if True not in judged:
            return MAX_BUCKET
        deepest = max(number for number in range(MAX_BUCKET + 1) if judged[number])
        last = max((number for number in worthy if judged[number]), default=-1)
        return MAX_BUCKET if last == deepest else last  # of what is deeper than all that was judged nothing is known


def _bucket_of(chain_index: int) -> int:
    return min(chain_index.bit_length(), MAX_BUCKET)
