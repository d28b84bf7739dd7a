"""Handoffs that share a link: in turn, within its bound, and with everything given back in the end."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from prefill_node.turns import Turn, Turns
from tests.support.known_link import known_link
from tests.support.simulated_link import SimulatedLink

SLAB = 2**19  # two a message


def open_turns(turns: Turns, count: int) -> tuple[list[Turn], list[int]]:
    """So many handoffs, and the list of those that were told to look again."""
    told: list[int] = []

    def tell(number: int) -> Turn:
        return Turn(turns, lambda: told.append(number))

    return [tell(number) for number in range(count)], told


def test_a_handoff_alone_sends_at_once() -> None:
    turns = Turns(SLAB)
    (turn,), _ = open_turns(turns, 1)
    assert turn.num_parts(1) == 1


def test_who_asked_first_sends_first_and_the_next_is_told() -> None:
    (first, second), told = open_turns(known_link(SLAB), 2)
    assert first.num_parts(9) == 2
    assert second.num_parts(1) == 0
    first.sent(2, 0.0)
    assert told == [1]
    assert second.num_parts(1) == 1
    assert first.num_parts(7) == 0, "it is behind the other now"


def test_a_full_link_makes_wait_until_an_answer() -> None:
    (first, second), told = open_turns(known_link(SLAB), 2)
    for _ in range(2):
        first.sent(first.num_parts(9), 0.0)
    assert second.num_parts(9) == 0
    first.answered(0.001)
    assert told == [1]
    assert second.num_parts(9) == 2


def test_a_handoff_that_ends_gives_back_what_it_holds_and_its_place() -> None:
    turns = known_link(SLAB)
    (first, second, third), told = open_turns(turns, 3)
    for _ in range(2):
        first.sent(first.num_parts(9), 0.0)
    assert (second.num_parts(9), third.num_parts(9)) == (0, 0)
    second.close()
    first.close()
    assert told[-1] == 2
    assert third.num_parts(9) == 2
    assert turns.pace.in_flight_bytes == 0


def test_streams_of_one_link_get_the_same() -> None:
    link = SimulatedLink(Turns(2**16), 1e6)
    link.open(5)
    link.run(60.0)
    counts = [stream.num_blocks for stream in link.streams]
    assert max(counts) - min(counts) <= 8, counts  # a message or two


class SharedLink(RuleBasedStateMachine):
    """Handoffs come, send, are answered and go in any order, at any speed."""

    turns_open = Bundle("turns_open")

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns(SLAB)
        self.pace = self.turns.pace
        self.now = 0.0
        self.sizes: dict[Turn, list[int]] = {}  # blocks a message that is on the way
        self.waiting: list[Turn] = []  # who asked, in this order

    @rule(target=turns_open)
    def open(self) -> Turn:
        turn = Turn(self.turns, lambda: None)
        self.sizes[turn] = []
        return turn

    @rule(turn=turns_open, num_waiting=st.integers(1, 9))
    def ask(self, turn: Turn, num_waiting: int) -> None:
        num_blocks = turn.num_parts(num_waiting)
        if not num_blocks and self.sizes[turn] and turn not in self.turns._queue:  # it has its share
            self.waiting = [other for other in self.waiting if other is not turn]
            return
        if turn not in self.waiting:
            self.waiting.append(turn)
        assert 0 <= num_blocks <= min(2, num_waiting)
        if num_blocks:
            assert self.waiting[0] is turn
            turn.sent(num_blocks, self.now)
            self.sizes[turn].append(num_blocks)
            self.waiting.remove(turn)
            assert self.pace.in_flight_bytes <= self.pace.bound_bytes
        elif self.waiting[0] is turn:
            assert any(self.sizes.values()), "an empty link lets the first go"

    @precondition(lambda self: any(self.sizes.values()))
    @rule(data=st.data(), elapsed_s=st.sampled_from([0.0, 0.0001, 0.01, 0.2, 0.3, 5.0]))
    def answer(self, data: st.DataObject, elapsed_s: float) -> None:
        turn = data.draw(st.sampled_from([turn for turn, sizes in self.sizes.items() if sizes]))
        self.now += elapsed_s
        turn.answered(self.now)
        self.sizes[turn].pop(0)

    @rule(turn=consumes(turns_open))
    def close(self, turn: Turn) -> None:
        turn.close()
        del self.sizes[turn]
        self.waiting = [other for other in self.waiting if other is not turn]

    @invariant()
    def all_is_counted(self) -> None:
        """What is on the way is part of what is not answered: some of that is known to have arrived."""
        num_unanswered = [sum(sizes) for sizes in self.sizes.values()]
        assert 0 <= self.pace.in_flight_bytes <= min(4, sum(num_unanswered)) * self.turns.part_bytes
        assert self.turns.part_bytes <= self.pace.bound_bytes <= 4 * self.turns.part_bytes
        assert max(num_unanswered, default=0) <= 4

    def teardown(self) -> None:
        for turn in self.sizes:
            turn.close()
        assert self.pace.in_flight_bytes == 0
        late = Turn(self.turns, lambda: None)
        assert late.num_parts(1) == 1, "nobody is left in the line"


TestSharedLink = SharedLink.TestCase
TestSharedLink.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_the_next_in_line_is_told_when_a_handoff_ends_that_filled_the_link() -> None:
    (first, second), told = open_turns(known_link(SLAB), 2)
    for _ in range(2):
        first.sent(first.num_parts(9), 0.0)
    assert second.num_parts(9) == 0
    first.close()
    assert told == [1]
    assert second.num_parts(9) == 2


def test_streams_that_are_left_unanswered_do_not_hold_up_the_others() -> None:
    """They fill the link; then another one's BEGIN, which takes no turn, is answered: theirs have arrived."""
    turns = Turns(slab_bytes=1_000)
    told: list[str] = []
    silent = [Turn(turns, lambda: told.append("silent")) for _ in range(2)]
    for turn in silent:
        turn.sent(turn.num_parts(10_000), 1.0)
    other = Turn(turns, lambda: told.append("other"))
    assert other.num_parts(1) == 0
    other.arrived_before(2.0)
    assert told[-1] == "other"
    assert other.num_parts(1) == 1
    for turn in (*silent, other):
        turn.close()
    assert turns.pace.in_flight_bytes == 0
