"""How much is on the way over links of all speeds, and how long a ping waits behind it. Time is simulated."""

from __future__ import annotations

import pytest

from prefill_node.pace import Pace
from prefill_node.turns import Turns
from tests.support.known_link import known_link
from tests.support.simulated_link import SimulatedLink

KIB, MIB = 2**10, 2**20
SLAB = 64 * KIB


def test_a_new_link_starts_with_128_kib_or_one_block() -> None:
    assert Pace(1_000, 1_000_000).bound_bytes == 128 * KIB
    assert Pace(700_000, 700_000).bound_bytes == 700_000
    assert Pace(10, 100).bound_bytes == 200


@pytest.mark.parametrize(
    ("slab_bytes", "full_bytes"),
    [
        (512, 1_894 * (512 + 76)),
        (360 * KIB, 3 * (360 * KIB + 76)),
        (MIB // 2, 2 * (MIB // 2 + 76)),
        (720 * KIB, 720 * KIB + 76),
        (2 * MIB, MIB + 76),
        (5 * MIB, MIB + 76),
    ],
)
def test_a_fast_link_gets_two_full_messages_and_no_more(slab_bytes: int, full_bytes: int) -> None:
    pace = known_link(slab_bytes).pace
    assert pace.message_bytes == full_bytes
    assert pace.bound_bytes == 2 * full_bytes


def test_an_answer_at_most_doubles_the_bound() -> None:
    pace = Pace(KIB, MIB)
    bounds = []
    for second in range(5):
        pace.answered(pace.sent(pace.message_bytes, second), second + 0.000_1)
        bounds.append(pace.bound_bytes // KIB)
    assert bounds == [256, 512, 1_024, 2_048, 2_048]


def test_a_late_answer_takes_the_bound_at_once_to_what_the_link_carries_in_a_quarter_of_a_second() -> None:
    pace = known_link(KIB).pace
    pace.answered(pace.sent(500_000, 10.0), 10.5)
    assert pace.bound_bytes == 250_000
    pace.answered(pace.sent(100_000, 20.0), 60.0)
    assert pace.bound_bytes == KIB + 76, "one part may always go"


def test_a_small_message_that_came_in_time_takes_nothing_away() -> None:
    """2 KiB in 20 ms prove 100 KB/s, not that there is no more."""
    pace = known_link(KIB).pace
    bound_bytes = pace.bound_bytes
    pace.answered(pace.sent(2_048, 10.0), 10.02)
    assert pace.bound_bytes == bound_bytes


def test_streams_whose_messages_arrive_together_do_not_look_faster_than_the_link() -> None:
    """A large message and a small one behind it, interleaved: the small one's answer comes soon, and proves 10 kB in
    20 ms, not the large one's bytes as well."""
    pace = Pace(KIB, 2 * MIB)
    pace.bound_bytes = 600_000
    large, small = pace.sent(300_000, 1.0), pace.sent(10_000, 1.0)
    pace.answered(small, 1.02)
    assert pace.bound_bytes == 600_000
    pace.answered(large, 1.1)
    assert pace.bound_bytes == pytest.approx(775_000, abs=1)  # 310 kB in 0.1 s


@pytest.mark.parametrize("num_streams", [1, 3, 8])
@pytest.mark.parametrize("bytes_per_s", [0.2e6, 0.5e6, 1e6, 3e6, 10e6, 100e6, 1e9])
def test_a_ping_waits_less_than_a_second_at_any_rate(bytes_per_s: float, num_streams: int) -> None:
    link = SimulatedLink(Turns(SLAB), bytes_per_s)
    link.open(num_streams)
    link.run(20.0)
    assert link.worst_ping_s < 1.0
    assert link.num_bytes > 0.9 * 20.0 * bytes_per_s, "the link has hardly been idle"
    link.worst_ping_s = 0.0
    link.run(5.0)
    assert link.worst_ping_s < max(0.3, 1.1 * link.turns.part_bytes / bytes_per_s)


@pytest.mark.parametrize("num_streams", [1, 3])
def test_slabs_of_the_demo_model_over_1_mb_a_second(num_streams: int) -> None:
    """720 KiB: one of them at a time."""
    link = SimulatedLink(Turns(720 * KIB), 1e6)
    link.open(num_streams)
    link.run(20.0)
    assert link.worst_ping_s == pytest.approx(0.737, abs=0.001)


def test_the_whole_window_is_used_at_a_gigabyte_a_second() -> None:
    turns = Turns(SLAB)
    link = SimulatedLink(turns, 1e9)
    link.open(1)
    link.run(0.05)
    assert turns.pace.bound_bytes == 2 * turns.pace.message_bytes == 2 * 16 * (SLAB + 76)
    assert turns.pace.in_flight_bytes == turns.pace.bound_bytes


def test_a_long_round_trip_does_not_keep_a_link_slow() -> None:
    """0.1 s and 100 MB/s."""
    link = SimulatedLink(Turns(SLAB), 100e6, round_trip_s=0.1)
    link.open(2)
    link.run(2.0)
    assert link.turns.pace.bound_bytes == 2 * 16 * (SLAB + 76)


def test_a_link_that_becomes_slow_has_short_pings_after_what_was_on_the_way() -> None:
    turns = known_link(SLAB)
    link = SimulatedLink(turns, 1e9)
    link.open(3)
    link.run(1.0)
    link.bytes_per_s = 1e6
    link.run(5.0)
    link.worst_ping_s = 0.0
    link.run(5.0)
    assert link.worst_ping_s < 0.3
    link.bytes_per_s = 1e9
    link.run(1.0)
    assert turns.pace.bound_bytes == 2 * 16 * (SLAB + 76)


def test_a_clock_that_stands_still_is_no_error() -> None:
    pace = Pace(KIB, MIB)
    pace.answered(pace.sent(KIB, 1.0), 1.0)
    assert pace.in_flight_bytes == 0


def test_what_was_sent_before_something_answered_is_not_on_the_way_any_more() -> None:
    """Its own answer may be late for reasons of its stream, and then says nothing about the link."""
    pace = Pace(KIB, 1024 * KIB)
    first, second = pace.sent(64 * KIB, 1.0), pace.sent(64 * KIB, 1.1)
    assert not pace.fits(KIB)
    pace.arrived_before(1.1, 1.15)
    assert (pace.in_flight_bytes, pace.fits(64 * KIB)) == (64 * KIB, True)
    pace.answered(second, 1.151)
    bound_bytes = pace.bound_bytes
    pace.answered(first, 30.0)
    pace.forgotten(first)
    assert (pace.in_flight_bytes, pace.bound_bytes) == (0, bound_bytes)


def test_what_arrived_unanswered_counts_with_its_time_as_well_as_its_bytes() -> None:
    """1 MB/s. The first message's own answer is withheld, another one's shows after 0.4 s that it has arrived. What is
    sent then, behind one that is under way, has come after 0.6 s: 600 kB in that time, not in a whole second."""
    pace = Pace(KIB, 2 * MIB)
    pace.bound_bytes = 2_000_000
    pace.sent(400_000, 1.0)
    pace.sent(300_000, 1.1)
    pace.arrived_before(1.05, 1.4)
    last = pace.sent(300_000, 1.4)
    pace.answered(last, 2.0)
    assert pace.bound_bytes == pytest.approx(250_000, abs=1)
