import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.reuse import EPOCH, EXPLORE, MIN_STORED, Reuse


def store(reuse: Reuse, chain_index: int, num_blocks: int, num_reused: int = 0) -> None:
    for _ in range(num_reused):
        reuse.reused(chain_index)
    for _ in range(num_blocks):
        reuse.stored(chain_index)  # the last one of an epoch ends it


def pass_exploration(reuse: Reuse) -> None:
    for _ in range(EXPLORE):
        assert reuse.worth(0)


def test_everything_is_worth_it_until_something_was_measured() -> None:
    reuse = Reuse(0.5)
    pass_exploration(reuse)
    store(reuse, 100, MIN_STORED)
    assert reuse.worth(100)
    assert reuse.rate(100) == 1.0


def test_places_that_are_hardly_used_again_are_not_worth_it_nor_is_what_follows() -> None:
    reuse = Reuse(0.05)
    pass_exploration(reuse)
    store(reuse, 20, 4000, 400)
    store(reuse, 40, 4000, 100)
    store(reuse, 100, EPOCH - 8000, 10)
    assert reuse.rate(40) == pytest.approx(0.025)
    assert reuse.worth(0)  # not measured; what is deeper and worth it needs it
    assert reuse.worth(31)
    assert not reuse.worth(32)  # 32 to 63
    assert not reuse.worth(100)
    assert not reuse.worth(5000)


def test_a_shallow_place_is_worth_it_for_the_sake_of_a_deeper_one() -> None:
    reuse = Reuse(0.05)
    pass_exploration(reuse)
    store(reuse, 0, 4000, 0)
    store(reuse, 40, EPOCH - 4000, 4000)
    assert reuse.worth(0)
    assert reuse.worth(5000)  # of which nothing is known


def test_blocks_are_not_judged_before_they_had_time_to_come_back() -> None:
    reuse = Reuse(0.05)
    pass_exploration(reuse)
    store(reuse, 40, EPOCH - 1)
    assert reuse.worth(40)
    store(reuse, 40, 1)
    assert not reuse.worth(40)


def test_now_and_then_all_is_worth_it_so_that_a_change_is_seen() -> None:
    reuse = Reuse(0.05)
    store(reuse, 40, EPOCH)
    answers = [reuse.worth(40) for _ in range(40_000)]
    assert answers[:EXPLORE] == [True] * EXPLORE
    assert not any(answers[EXPLORE:16_384])
    assert all(answers[16_384 : 16_384 + EXPLORE])
    store(reuse, 40, EPOCH, num_reused=EPOCH)
    assert reuse.worth(40)


@given(st.lists(st.tuples(st.integers(0, 70_000), st.integers(0, 5000), st.integers(0, 5000)), max_size=8))
def test_without_a_threshold_everything_is_always_worth_it(stores: list[tuple[int, int, int]]) -> None:
    reuse = Reuse(0.0)
    pass_exploration(reuse)
    for chain_index, num_blocks, num_reused in stores:
        store(reuse, chain_index, num_blocks, num_reused)
        assert reuse.worth(chain_index)
        assert 0 <= reuse.rate(chain_index) <= 1
