"""What a kvstore probably has of a prompt, by what nodes had and by what came from there."""

from __future__ import annotations

import pytest

from coordinator.holders import keys_of
from coordinator.prefix_index import PrefixIndex
from coordinator.stored_prefixes import StoredPrefixes
from kvrelay.cluster import CacheCleared, CacheEvents, CacheRemoved, CacheStored
from kvrelay.types import BlockHash, InstanceId

NODE = InstanceId("p1")
HASHES = [BlockHash((number << 4).to_bytes(8, "little") * 4) for number in range(1, 9)]


def nothing_held(key: int) -> bool:
    return False


def test_a_block_that_some_node_has_or_gave_up_may_be_stored() -> None:
    prefixes = StoredPrefixes(lambda key: index.is_held(key), 100)
    index = PrefixIndex(on_given_up=prefixes.given_up)
    index.joined(NODE, 0.0)
    assert prefixes.num_blocks(HASHES) == 0
    index.apply(NODE, CacheEvents(1, (CacheCleared(), CacheStored(HASHES[:6]))), 0.0)
    assert prefixes.num_blocks(HASHES) == 6
    index.apply(NODE, CacheEvents(3, (CacheRemoved(HASHES[2:6]),)), 0.0)
    assert prefixes.num_blocks(HASHES) == 6
    index.forget(NODE)
    index.joined(InstanceId("p2"), 0.0)
    index.apply(InstanceId("p2"), CacheEvents(1, (CacheCleared(), CacheStored(HASHES[6:7]))), 0.0)
    assert prefixes.num_blocks(HASHES) == 7, "a store outlives nodes"
    index.assigned(InstanceId("p2"), HASHES, 0.0)
    assert prefixes.num_blocks(HASHES) == 7, "what is not computed yet cannot be stored"


def test_what_was_given_up_longest_ago_is_forgotten_first() -> None:
    prefixes = StoredPrefixes(nothing_held, 6)
    prefixes.given_up(keys_of(HASHES[:3]))
    prefixes.given_up(keys_of(HASHES[3:6]))
    prefixes.given_up(keys_of(HASHES[:3]))
    prefixes.given_up(keys_of(HASHES[6:7]))
    assert prefixes.num_blocks(HASHES) == 3
    assert prefixes.num_blocks(HASHES[4:]) == 3


def test_nothing_is_expected_while_nothing_came() -> None:
    prefixes = StoredPrefixes(nothing_held, 6)
    assert prefixes.chance("a") == 0.0
    prefixes.loaded("a", 1_000, 0)
    assert prefixes.chance("a") == 0.0
    prefixes.loaded("a", 0, 500)  # more than was known of
    assert 0.3 < prefixes.chance("a") < 0.35


def test_the_chance_is_the_part_that_came_lately_for_each_tenant() -> None:
    prefixes = StoredPrefixes(nothing_held, 6)
    for _ in range(200):
        prefixes.loaded("a", 1_000, 1_000)
        prefixes.loaded("b", 1_000, 250)
    assert prefixes.chance("a") == pytest.approx(1.0)
    assert prefixes.chance("b") == pytest.approx(0.25)
    for _ in range(100):  # the store went away
        prefixes.loaded("a", 1_000, 0)
    assert prefixes.chance("a") < 0.02
    assert prefixes.chance("c") == 0.0


def test_of_many_tenants_the_longest_unheard_of_is_forgotten() -> None:
    prefixes = StoredPrefixes(nothing_held, 6)
    for number in range(1_001):
        prefixes.loaded(str(number), 16, 16)
    assert [prefixes.chance(name) for name in ("0", "1", "1000")] == [0.0, 1.0, 1.0]
