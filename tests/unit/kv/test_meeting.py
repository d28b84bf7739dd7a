"""Two ends of a prompt's blocks, in any order of claims and loads: each block is computed or loaded, none is both."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv.meeting import Meeting


@given(first=st.integers(0, 5), num_blocks=st.integers(0, 20), moves=st.lists(st.integers(0, 6), max_size=60))
def test_every_block_is_filled_once(first: int, num_blocks: int, moves: list[int]) -> None:
    """A move of 0 loads a block, another claims so many for computing."""
    meeting = Meeting(first, first + num_blocks)
    loaded: list[int] = []
    computed_to = first
    for move in [*moves, *[5] * 10]:
        if move == 0:
            meets = computed_to >= meeting.loaded_from
            assert meeting.load(loaded.append) != meets
        else:
            computed_to = meeting.compute(computed_to + move)
    assert meeting.is_met
    assert not meeting.load(loaded.append)
    if loaded:
        assert computed_to == meeting.loaded_from
    assert loaded == list(range(first + num_blocks - 1, meeting.loaded_from - 1, -1))
    assert meeting.num_loaded == len(loaded)


def test_what_the_store_turns_out_not_to_have_is_left_to_compute() -> None:
    meeting = Meeting(2, 10)
    meeting.shorten(5)
    loaded: list[int] = []
    assert meeting.load(loaded.append)
    assert loaded == [4]
    assert meeting.compute(4) == 4
    assert meeting.is_met
    assert meeting.end == 5


def test_shortened_below_what_is_computed_nothing_is_loaded() -> None:
    meeting = Meeting(0, 10)
    assert meeting.compute(6) == 6
    meeting.shorten(5)
    assert meeting.is_met
    assert not meeting.load(lambda index: None)
    assert meeting.compute(8) == 8


def test_a_block_whose_writing_fails_is_not_loaded() -> None:
    meeting = Meeting(0, 3)

    def fail(index: int) -> None:
        raise ValueError(index)

    with pytest.raises(ValueError, match="2"):
        meeting.load(fail)
    assert meeting.num_loaded == 0
    assert meeting.compute(3) == 3


def test_a_large_step_stops_half_way_to_blocks_that_come() -> None:
    meeting = Meeting(0, 64)
    assert meeting.compute(8) == 8, "none has come"
    assert meeting.load(lambda index: None)
    assert meeting.compute(64) == 8 + 27
    assert meeting.compute(64) == 35 + 14
    assert meeting.compute(64) == 49 + 8
    assert meeting.compute(64) == 63
    assert meeting.is_met


def test_two_threads_share_the_blocks_out() -> None:
    """Each block has one writer, whichever is quicker."""
    owners: dict[int, list[str]] = {index: [] for index in range(2_000)}
    meeting = Meeting(0, 2_000)

    def load() -> None:
        while meeting.load(lambda index: owners[index].append("loaded")):
            pass

    loader = threading.Thread(target=load)
    loader.start()
    position = 0
    while not meeting.is_met:
        end = meeting.compute(position + 3)
        for index in range(position, min(end, 2_000)):
            owners[index].append("computed")
        position = end
    loader.join()
    assert all(len(owner) == 1 for owner in owners.values())
