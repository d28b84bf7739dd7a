import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvstore.chains import Chains

# key -> parent, in a tree that forks in two
PARENTS = {bytes([i]): bytes([(i - 1) // 2]) for i in range(1, 16)}


def test_a_block_comes_after_all_that_follow_it() -> None:
    chains = Chains()
    for key in (b"b", b"c", b"d"):
        chains.link(key, b"a")
    chains.link(b"e", b"c")
    found = chains.deepest_first(b"a")
    assert sorted(found) == [b"a", b"b", b"c", b"d", b"e"]
    assert found[-1] == b"a"
    assert found.index(b"e") < found.index(b"c")


def test_a_chain_of_many_blocks_needs_no_deep_stack() -> None:
    chains = Chains()
    keys = [number.to_bytes(4, "big") for number in range(65_536)]
    for parent, key in itertools.pairwise(keys):
        chains.link(key, parent)
    assert chains.deepest_first(keys[0]) == keys[::-1]


@given(st.lists(st.sampled_from(sorted(PARENTS)), max_size=60))
def test_edges_are_those_that_were_linked_and_not_unlinked(toggled: list[bytes]) -> None:
    chains = Chains()
    linked: set[bytes] = set()
    for key in toggled:
        (chains.unlink if key in linked else chains.link)(key, PARENTS[key])
        linked ^= {key}
        assert chains.num_edges() == len(linked)
        for parent in {*PARENTS, b"\0"}:
            assert chains.is_tail(parent) == (parent not in {PARENTS[one] for one in linked})
            assert {*chains.deepest_first(parent)} >= {one for one in linked if PARENTS[one] == parent} | {parent}
