"""What one listener is yet to hear of a pool's named blocks: the difference to what it has heard, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice

from kvrelay.cluster import CacheCleared, CacheEvent, CacheEvents, CacheRemoved, CacheStored
from kvrelay.types import BlockHash

MAX_PENDING = 32_768  # hashes that wait for a slow listener; with more, it hears of everything again
MAX_MESSAGE_HASHES = 1_024  # 34 KiB on the wire, and a millisecond of a coordinator


class CacheFeed:
    """One listener's. A block that came and went, or went and came, before it was told is not told at all.

    The pool's thread notes, the listener's takes. `note_stored` and `note_removed` are called with the lock held and
    cost O(1); nothing is noted while the feed has not begun, or while all is to be told anyway.
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        names: Callable[[], list[BlockHash]],
        on_news: Callable[[], object],
        *,
        max_pending: int,
        max_message_hashes: int,
    ) -> None:
        """`names` gives all names there are, and is called with `lock` held. `on_news` is called on the pool's thread,
        with the lock held, once before each time there is something to take after there was nothing."""
        self._lock = lock
        self._names = names
        self._on_news = on_news
        self._max_pending = max_pending
        self._max_message_hashes = max_message_hashes
        self._begun = False
        self._tells_all = False  # the next message clears, and what is here by then follows
        self._snapshot: list[BlockHash] = []  # of it, what is not taken yet, the last first
        self._pending: dict[BlockHash, bool] = {}  # True: stored, False: removed
        self._sequence = 1

    def note_stored(self, block_hash: BlockHash) -> None:
        if self._begun and not self._tells_all:
            self._note(block_hash, True)

    def note_removed(self, block_hash: BlockHash) -> None:
        if self._begun and not self._tells_all:
            self._note(block_hash, False)

    def begin(self) -> None:
        """Somebody listens from now on, and knows nothing yet, or no more."""
        with self._lock:
            self._begun = True
            self._tell_all()

    def end(self) -> None:
        """Nobody listens. The next to listen gets numbers from 1."""
        with self._lock:
            self._begun = False
            self._tell_all()
            self._sequence = 1

    @property
    def has_news(self) -> bool:
        """Whether `take` gives something."""
        with self._lock:
            return self._begun and bool(self._tells_all or self._snapshot or self._pending)

    def take(self) -> CacheEvents | None:
        """The next message, of bounded size; None when everything is told."""
        with self._lock:
            events = self._next_events() if self._begun else []
            if not events:
                return None
            first_sequence = self._sequence
            self._sequence += len(events)
            return CacheEvents(first_sequence, tuple(events))

    def _note(self, block_hash: BlockHash, stored: bool) -> None:
        pending = self._pending
        if pending.pop(block_hash, stored) is not stored:
            return  # the listener was to hear of the opposite, and knows better without
        if not pending and not self._snapshot:
            self._on_news()
        pending[block_hash] = stored
        if len(pending) > self._max_pending:
            self._tell_all()

    def _tell_all(self) -> None:
        self._tells_all = True
        self._snapshot = []
        self._pending = {}

    def _next_events(self) -> list[CacheEvent]:
        events: list[CacheEvent] = []
        if self._tells_all:
            self._tells_all = False
            self._snapshot = self._names()
            self._snapshot.reverse()
            events.append(CacheCleared())
        if self._snapshot:
            start = max(0, len(self._snapshot) - self._max_message_hashes)
            chunk = self._snapshot[start:]
            del self._snapshot[start:]
            chunk.reverse()
            events.append(CacheStored(chunk))
        elif self._pending:
            told = dict(islice(self._pending.items(), self._max_message_hashes))
            if len(told) == len(self._pending):
                self._pending = {}
            else:
                for block_hash in told:
                    del self._pending[block_hash]
            events += _told(told)
        return events


def _told(pending: dict[BlockHash, bool]) -> list[CacheEvent]:
    removed = [block_hash for block_hash, is_stored in pending.items() if not is_stored]
    stored = [block_hash for block_hash, is_stored in pending.items() if is_stored]
    events: list[CacheEvent] = []
    if removed:
        events.append(CacheRemoved(removed))
    if stored:
        events.append(CacheStored(stored))
    return events
