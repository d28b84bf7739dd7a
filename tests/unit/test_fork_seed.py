"""Seeds of several answers to one prompt."""

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.sampling import fork_seed

SEEDS = st.integers(0, 2**64 - 1)


def test_the_first_answer_is_the_requests_own_and_others_are_the_same_everywhere() -> None:
    """Kept, not derived: another value would change the answers that a seed gives."""
    assert [fork_seed(7, index) for index in range(3)] == [7, 2752974492218918672, 13911518034856012313]


@given(SEEDS, st.integers(1, 128))
def test_a_seed_fits_the_wire_and_is_no_neighbours(seed: int, index: int) -> None:
    derived = fork_seed(seed, index)
    assert 0 <= derived < 2**64
    assert not 0 <= derived - seed <= 128, "another request's seed may well be so near"


def test_answers_of_many_requests_share_no_seed() -> None:
    seeds = {fork_seed(seed, index) for seed in range(1_000) for index in range(8)}
    assert len(seeds) == 8_000
