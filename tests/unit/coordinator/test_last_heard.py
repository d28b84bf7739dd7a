"""What is kept of many, by when each was heard of last."""

from __future__ import annotations

from coordinator.last_heard import LastHeard


def test_of_more_than_can_be_kept_the_longest_unheard_of_begins_anew() -> None:
    kept = LastHeard[list[int]](list, most=2)
    kept.of("a").append(1)
    kept.of("b").append(2)
    assert kept.get("a") == [1], "no hearing of it"
    kept.of("c").append(3)
    assert len(kept) == 2
    assert kept.get("a") is None
    assert list(kept) == [("b", [2]), ("c", [3])]
    kept.of("b").append(4)
    assert list(reversed(kept)) == [("b", [2, 4]), ("c", [3])]
    assert kept.of("a") == []
    assert kept.get("c") is None
