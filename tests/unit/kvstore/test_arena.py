import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.arena import Arena, Slot


def take(arena: Arena, num_bytes: int) -> Slot:
    slot = arena.take(num_bytes)
    assert slot is not None
    return slot


def test_slots_of_one_size_fill_the_arena_to_the_last_byte() -> None:
    arena = Arena(3 * 8_000)
    slots = [take(arena, 8_000) for _ in range(3)]
    assert sorted(slot.offset for slot in slots) == [0, 8_000, 16_000]
    assert arena.take(8_000) is None
    arena.check()


def test_a_slot_comes_back_only_when_its_last_view_is_gone() -> None:
    arena = Arena(64)
    slot = take(arena, 64)
    slot.view[:] = b"a" * 64
    sent = slot.view[8:16]
    del slot
    assert arena.take(64) is None
    assert sent == b"a" * 8
    del sent
    assert take(arena, 64).offset == 0


def test_a_view_may_end_on_another_thread() -> None:
    arena = Arena(64)
    held = [take(arena, 64).view]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert arena.take(64) is not None


def test_slots_keep_their_bytes_apart() -> None:
    arena = Arena(1 << 16)
    slots = [take(arena, 100) for _ in range(512)]
    for number, slot in enumerate(slots):
        slot.view[:] = bytes([number % 251]) * 100
    assert all(slot.view == bytes([number % 251]) * 100 for number, slot in enumerate(slots))
    assert arena.take(1) is None


def test_what_one_size_left_another_uses() -> None:
    arena = Arena(4 * 64)
    slots = [take(arena, 64) for _ in range(4)]
    del slots[1:3]
    assert take(arena, 128).offset == 64
    arena.check()


def test_a_window_names_the_fewest_bytes_to_drop() -> None:
    arena = Arena(6 * 64)
    slots = [take(arena, 64) for _ in range(6)]
    del slots[3]
    assert arena.take(128) is None
    assert arena.window(128, lambda offset: True) == [2 * 64]
    assert arena.window(128, lambda offset: offset != 2 * 64) == [4 * 64]
    assert arena.window(128, lambda offset: False) is None
    assert arena.window(7 * 64, lambda offset: True) is None


@pytest.mark.parametrize("num_bytes", [1, 1 << 20])
def test_an_arena_of_nothing_holds_nothing(num_bytes: int) -> None:
    arena = Arena(0)
    assert arena.take(num_bytes) is None
    assert arena.window(num_bytes, lambda offset: True) is None
    arena.check()


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=80))
def test_whatever_is_taken_and_dropped_the_books_hold(steps: list[tuple[bool, int]]) -> None:
    """A window that is vacated always has room for what it was asked for."""
    arena, held = Arena(64 * 40), {}
    for keep, number in steps:
        if not keep and held:
            del held[list(held)[number % len(held)]]
        slot = arena.take(number)
        if slot is None:
            for offset in arena.window(number, lambda offset: True) or []:
                del held[offset]
            slot = arena.take(number)
            assert slot is not None
        held[slot.offset] = slot
        del slot
        arena.check()
    held.clear()
    assert arena.take(64 * 40) is not None
