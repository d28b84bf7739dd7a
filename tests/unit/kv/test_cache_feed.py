"""Whoever listens to a pool's named blocks ends up with what is there, in few and bounded messages."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kvrelay.cluster import CacheCleared, CacheEvent, CacheEvents, CacheRemoved, CacheStored
from kvrelay.kv.cache_feed import CacheFeed
from kvrelay.kv.named_blocks import NamedBlocks
from kvrelay.kv.pool import BlockPool
from kvrelay.types import BlockHash, BlockId, ReservationId


def name(text: str) -> BlockHash:
    return BlockHash(text.encode())


def names(text: str) -> list[BlockHash]:
    return [name(char) for char in text]


def told(feed: CacheFeed) -> list[CacheEvent]:
    """All that is to be taken now."""
    events: list[CacheEvent] = []
    while (message := feed.take()) is not None:
        events += message.events
    return events


def opened(named: NamedBlocks, **bounds: int) -> CacheFeed:
    feed = named.open_feed(lambda: None, **bounds)
    feed.begin()
    return feed


def named_blocks(text: str) -> NamedBlocks:
    named = NamedBlocks()
    for number, block_hash in enumerate(names(text)):
        named.claim(block_hash, BlockId(number))
    return named


def test_it_begins_with_all_there_is_in_messages_of_bounded_size() -> None:
    feed = opened(named_blocks("abcde"), max_message_hashes=2)
    assert feed.take() == CacheEvents(1, (CacheCleared(), CacheStored(names("ab"))))
    assert feed.take() == CacheEvents(3, (CacheStored(names("cd")),))
    assert feed.has_news
    assert feed.take() == CacheEvents(4, (CacheStored(names("e")),))
    assert not feed.has_news
    assert feed.take() is None


def test_an_empty_pool_says_so() -> None:
    assert opened(NamedBlocks()).take() == CacheEvents(1, (CacheCleared(),))


def test_what_came_and_went_before_it_was_told_is_not_told() -> None:
    named = named_blocks("ab")
    feed = opened(named)
    told(feed)
    named.claim(name("c"), BlockId(2))
    named.remove(name("c"))
    named.remove(name("a"))
    named.claim(name("a"), BlockId(3))
    assert told(feed) == []
    named.remove(name("b"))
    named.claim(name("d"), BlockId(4))
    named.claim(name("e"), BlockId(5))
    assert feed.take() == CacheEvents(3, (CacheRemoved(names("b")), CacheStored(names("de"))))


def test_what_changes_while_all_is_told_comes_after_it() -> None:
    named = named_blocks("abc")
    feed = opened(named, max_message_hashes=2)
    assert feed.take() == CacheEvents(1, (CacheCleared(), CacheStored(names("ab"))))
    named.remove(name("a"))
    named.remove(name("c"))
    assert told(feed) == [CacheStored(names("c")), CacheRemoved(names("ac"))]


def test_a_name_that_is_taken_is_no_news() -> None:
    named = named_blocks("a")
    feed = opened(named)
    told(feed)
    assert named.claim(name("a"), BlockId(7)) == BlockId(0)
    assert told(feed) == []


def test_a_listener_that_is_too_slow_hears_of_everything_again() -> None:
    named = named_blocks("ab")
    feed = opened(named, max_pending=3)
    told(feed)
    for number, block_hash in enumerate(names("cdef")):
        named.claim(block_hash, BlockId(2 + number))
    named.remove(name("a"))
    assert told(feed) == [CacheCleared(), CacheStored(names("bcdef"))]
    named.remove(name("b"))
    assert told(feed) == [CacheRemoved(names("b"))]


def test_nothing_is_kept_for_those_who_do_not_listen() -> None:
    named = named_blocks("a")
    feed = opened(named, max_pending=1)
    told(feed)
    feed.end()
    for number, block_hash in enumerate(names("bcdef")):
        named.claim(block_hash, BlockId(1 + number))
    assert feed.take() is None
    feed.begin()
    assert feed.take() == CacheEvents(1, (CacheCleared(), CacheStored(names("abcdef")))), "and numbers begin anew"


def test_each_listener_has_its_own_place() -> None:
    named = named_blocks("a")
    fast, slow = named.open_feed(lambda: None), named.open_feed(lambda: None)
    fast.begin()
    slow.begin()
    told(fast)
    named.claim(name("b"), BlockId(1))
    assert told(fast) == [CacheStored(names("b"))]
    assert told(slow) == [CacheCleared(), CacheStored(names("ab"))]
    named.close_feed(fast)
    named.remove(name("b"))
    assert told(fast) == []
    assert told(slow) == [CacheRemoved(names("b"))]


def test_news_are_rung_in_once_until_they_are_taken() -> None:
    named, rings = NamedBlocks(), []
    feed = named.open_feed(lambda: rings.append(1))
    named.claim(name("a"), BlockId(0))
    feed.begin()
    told(feed)
    assert len(rings) == 0
    named.claim(name("b"), BlockId(1))
    named.claim(name("c"), BlockId(2))
    assert len(rings) == 1
    told(feed)
    named.remove(name("b"))
    assert len(rings) == 2


def apply(known: set[BlockHash], events: Iterable[CacheEvent]) -> None:
    for event in events:
        match event:
            case CacheCleared():
                known.clear()
            case CacheStored(hashes):
                assert known.isdisjoint(hashes)
                known.update(hashes)
            case CacheRemoved(hashes):
                assert known.issuperset(hashes)
                known.difference_update(hashes)


def test_a_pool_tells_what_becomes_findable_and_what_is_evicted_or_disowned() -> None:
    pool = BlockPool(4)
    feed = pool.named.open_feed(lambda: None)
    feed.begin()
    told(feed)
    a, b, c, d = pool.allocate(4)
    for block_id, block_hash in zip((a, b, c), names("abc"), strict=True):
        pool.register(block_id, block_hash)
    assert not pool.register(d, name("a")), "the first block of a name keeps it"
    assert told(feed) == [CacheStored(names("abc"))]
    pool.release([a, b, c, d])
    assert told(feed) == [], "held or cached, it is found"
    pool.reserve(ReservationId("r"), [name("a")], 3)
    assert told(feed) == [CacheRemoved(names("c"))], "d was free, the last of the chain is evicted"
    pool.disown([a])
    assert told(feed) == [CacheRemoved(names("a"))]


def test_a_listener_on_another_thread_never_hears_of_what_it_has_or_lacks() -> None:
    """It begins, overflows and begins anew while the pool's thread is at work; at the end both know the same."""
    named, known = named_blocks("ab"), set[BlockHash]()
    feed = opened(named, max_pending=40, max_message_hashes=8)
    universe = [name(f"{number}") for number in range(97)]
    done = threading.Event()

    def work() -> None:
        there: set[BlockHash] = set()
        for number in range(20_000):
            block_hash = universe[number * number % 97]
            if block_hash in there:
                there.remove(block_hash)
                named.remove(block_hash)
            else:
                there.add(block_hash)
                named.claim(block_hash, BlockId(2 + number))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    num_messages = 0
    while not done.is_set():
        message = feed.take()
        if message is not None:
            apply(known, message.events)
            num_messages += 1
            if num_messages % 50 == 0:
                feed.begin()
    thread.join()
    apply(known, told(feed))
    assert known == {block_hash for block_hash, _ in named.items()}
