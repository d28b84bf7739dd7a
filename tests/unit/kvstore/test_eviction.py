from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.eviction import ByteLRU

keys = st.integers(0, 6).map(lambda i: bytes([i]))


def test_the_oldest_go_first_and_only_as_many_as_needed() -> None:
    lru = ByteLRU(100)
    for key, size in ((b"a", 40), (b"b", 30), (b"c", 20)):
        lru.add(key, size)
    lru.touch([b"a", b"missing"])
    assert lru.make_room(10) == []
    assert lru.make_room(11) == [b"b"]
    assert list(lru) == [b"c", b"a"]
    assert lru.used_bytes == 60


def test_touching_a_chain_backwards_makes_its_head_the_last_to_go() -> None:
    lru = ByteLRU(3)
    for key in (b"head", b"middle", b"tail"):
        lru.add(key, 1)
    lru.touch(reversed([b"head", b"middle", b"tail"]))
    assert lru.pop_oldest(2) == [b"tail", b"middle"]


def test_adding_without_room_is_refused_and_changes_nothing() -> None:
    lru = ByteLRU(10)
    lru.add(b"a", 6)
    with pytest.raises(ValueError, match="5 bytes do not fit: 6 of 10 are used"):
        lru.add(b"b", 5)
    assert list(lru) == [b"a"]


def test_adding_again_replaces_the_size() -> None:
    lru = ByteLRU(10)
    lru.add(b"a", 6)
    lru.add(b"a", 9)
    assert (lru.used_bytes, len(lru)) == (9, 1)


@given(st.lists(st.tuples(st.sampled_from(["add", "touch", "discard"]), keys, st.integers(0, 12)), max_size=60))
def test_it_behaves_as_an_ordered_list_with_a_bound(operations: list[tuple[str, bytes, int]]) -> None:
    lru, model = ByteLRU(20), OrderedDict[bytes, int]()
    for operation, key, size in operations:
        if operation == "add":
            lru.discard(key)
            model.pop(key, None)
            evicted = lru.make_room(size)
            expected = []
            while sum(model.values()) + size > 20:
                expected.append(model.popitem(last=False)[0])
            assert evicted == expected
            lru.add(key, size)
            model[key] = size
        elif operation == "touch":
            lru.touch([key])
            if key in model:
                model.move_to_end(key)
        else:
            lru.discard(key)
            model.pop(key, None)
        assert list(lru) == list(model)
        assert lru.used_bytes == sum(model.values()) <= 20
