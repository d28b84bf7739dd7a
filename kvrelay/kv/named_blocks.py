"""The blocks of a pool that can be found by their hash, and those who are told of each that comes or goes."""

from __future__ import annotations

from collections.abc import Callable, ItemsView
from threading import Lock

from kvrelay.kv.cache_feed import MAX_MESSAGE_HASHES, MAX_PENDING, CacheFeed
from kvrelay.types import BlockHash, BlockId


class NamedBlocks:
    """Changed and looked into by the pool's thread alone; feeds are opened, read and closed by any thread.

    A change is made and told under one lock, so that what a feed knows is the state of one moment. The lock is held
    for less than a microsecond a block, and as long as copying the names takes when a feed begins.
    """

    def __init__(self) -> None:
        self._block_ids: dict[BlockHash, BlockId] = {}
        self._feeds: tuple[CacheFeed, ...] = ()
        self._lock = Lock()

    def find(self, block_hash: BlockHash) -> BlockId | None:
        return self._block_ids.get(block_hash)

    def claim(self, block_hash: BlockHash, block_id: BlockId) -> BlockId:
        """The block of this name, which is `block_id` unless there was one."""
        owner = self._block_ids.get(block_hash)
        if owner is not None:
            return owner
        with self._lock:
            self._block_ids[block_hash] = block_id
            for feed in self._feeds:
                feed.note_stored(block_hash)
        return block_id

    def remove(self, block_hash: BlockHash) -> None:
        """Raises KeyError where no block has the name."""
        with self._lock:
            del self._block_ids[block_hash]
            for feed in self._feeds:
                feed.note_removed(block_hash)

    def items(self) -> ItemsView[BlockHash, BlockId]:
        return self._block_ids.items()

    def __len__(self) -> int:
        return len(self._block_ids)

    def open_feed(
        self,
        on_news: Callable[[], object],
        *,
        max_pending: int = MAX_PENDING,
        max_message_hashes: int = MAX_MESSAGE_HASHES,
    ) -> CacheFeed:
        """As CacheFeed; it is told of nothing before it begins."""
        feed = CacheFeed(
            self._lock,
            lambda: list(self._block_ids),
            on_news,
            max_pending=max_pending,
            max_message_hashes=max_message_hashes,
        )
        with self._lock:
            self._feeds = (*self._feeds, feed)
        return feed

    def close_feed(self, feed: CacheFeed) -> None:
        with self._lock:
            self._feeds = tuple(one for one in self._feeds if one is not feed)
