from hypothesis import given
from hypothesis import strategies as st

from kvstore.deadlines import Deadlines


def test_a_deadline_that_moved_later_is_met_later() -> None:
    due_at = {b"a": 5.0}
    deadlines = Deadlines(due_at.get)
    deadlines.set(b"a", 5.0)
    due_at[b"a"] = 9.0
    assert deadlines.pop_due(5.0) == []
    assert deadlines.pop_due(9.0) == [b"a"]
    assert deadlines.pop_due(99.0) == []


def test_what_was_discarded_takes_no_room_for_long() -> None:
    deadlines = Deadlines(lambda _: 1e9)
    for number in range(10_000):
        key = str(number).encode()
        deadlines.set(key, 1e9)
        deadlines.discard(key)
    assert len(deadlines._heap) < 10


operations = st.tuples(st.sampled_from(["set", "later", "discard", "pop"]), st.sampled_from("abc"), st.integers(1, 9))


@given(st.lists(operations, max_size=40))
def test_each_key_is_due_once_at_its_present_deadline(steps: list[tuple[str, str, int]]) -> None:
    now = 0.0
    truth: dict[bytes, float] = {}
    deadlines = Deadlines(truth.get)
    for operation, name, seconds in steps:
        key = name.encode()
        if operation == "set":
            truth[key] = now + seconds
            deadlines.set(key, now + seconds)
        elif operation == "later" and key in truth:
            truth[key] += seconds
        elif operation == "discard":
            truth.pop(key, None)
            deadlines.discard(key)
        elif operation == "pop":
            now += seconds
            expected = {key for key, at in truth.items() if at <= now}
            assert set(due := deadlines.pop_due(now)) == expected
            assert len(due) == len(expected)
            for key in expected:
                del truth[key]
