"""The least of many, while items leave and are ranked anew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.heap import Heap

STEPS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5) | st.none()), max_size=200)


def test_equal_keys_keep_their_order_and_a_new_rank_goes_behind() -> None:
    heap: Heap[str] = Heap()
    for item in "abc":
        heap.rank(item, (1,))
    heap.rank("a", (1,))
    order = []
    while (item := heap.least()) is not None:
        order.append(item)
        heap.remove(item)
    assert order == ["b", "c", "a"]


@given(STEPS)
def test_it_agrees_with_a_sorted_list_and_keeps_little_that_left(steps: list[tuple[int, int | None]]) -> None:
    heap: Heap[int] = Heap()
    model: dict[int, tuple[int, int]] = {}  # item to key and number of the step
    for number, (item, key) in enumerate(steps):
        if key is None:
            assert heap.remove(item) == (model.pop(item, None) is not None)
        else:
            heap.rank(item, (key,))
            model[item] = (key, number)
        assert len(heap) == len(model)
        assert heap.least() == min(model, key=model.__getitem__, default=None)
        assert len(heap._entries) <= 2 * len(model) + 17
