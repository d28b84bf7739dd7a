"""Handoffs that share a link: in turn, within its bound, and with everything given back in the end."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class OnTheWay:
    """A message, as the link's books should have it."""

    turn: Turn
    num_bytes: int
    sent_at: float


class SharedLink(RuleBasedStateMachine):
    """Handoffs come, send, are answered and go in any order, at any speed. A handoff asks when it has more to send,
    when it was answered, and when it was told to look again, never else: who is not told waits for ever."""

    turns_open = Bundle("turns_open")

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns(SLAB)
        self.pace = self.turns.pace
        self.now = 0.0
        self.num_waiting: dict[Turn, int] = {}  # parts that each open handoff has to send
        self.unanswered: dict[Turn, list[OnTheWay]] = {}
        self.on_the_way: list[OnTheWay] = []  # what of it is not known to have arrived
        self.probes: list[tuple[Turn, float]] = []  # messages without a turn that are not answered: BEGIN, END
        self.line: list[Turn] = []  # who asked and did not send since, in this order
        self.told: list[Turn] = []

    @rule(target=turns_open)
    def open(self) -> Turn:
        turn = Turn(self.turns, lambda: self.told.append(turn))
        self.num_waiting[turn], self.unanswered[turn] = 0, []
        return turn

    @rule(turn=turns_open, num_parts=st.integers(1, 9))
    def compute(self, turn: Turn, num_parts: int) -> None:
        self.num_waiting[turn] += num_parts
        self.look_again(turn)

    @rule(elapsed_s=st.sampled_from([0.0001, 0.01, 0.2, 0.3, 5.0]))
    def time_passes(self, elapsed_s: float) -> None:
        self.now += elapsed_s

    @precondition(lambda self: any(self.unanswered.values()))
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from([turn for turn, messages in self.unanswered.items() if messages]))
        message = self.unanswered[turn].pop(0)
        turn.answered(self.now)
        self.on_the_way = [
            other for other in self.on_the_way if other.sent_at >= message.sent_at and other is not message
        ]
        self.look_again(turn)

    @rule(turn=turns_open)
    def begin_or_end(self, turn: Turn) -> None:
        self.probes.append((turn, self.now))

    @precondition(lambda self: self.probes)
    @rule(data=st.data())
    def answer_begin_or_end(self, data: st.DataObject) -> None:
        turn, sent_at = self.probes.pop(data.draw(st.integers(0, len(self.probes) - 1)))
        turn.arrived_before(sent_at, self.now)
        self.on_the_way = [other for other in self.on_the_way if other.sent_at >= sent_at]
        self.look_again(turn)

    @rule(turn=consumes(turns_open))
    def close(self, turn: Turn) -> None:
        turn.close()
        del self.num_waiting[turn], self.unanswered[turn]
        self.on_the_way = [message for message in self.on_the_way if message.turn is not turn]
        self.probes = [probe for probe in self.probes if probe[0] is not turn]
        self.line = [other for other in self.line if other is not turn]
        self.look_again()

    def look_again(self, *turns: Turn) -> None:
        """What the event loop does: who was told, and only who was, asks until it may not send."""
        self.told += turns
        while self.told:
            turn = self.told.pop(0)
            while self.num_waiting.get(turn, 0) and (num_parts := turn.num_parts(self.num_waiting[turn])):
                self.send(turn, num_parts)
            if turn in self.turns._queue and turn not in self.line:
                self.line.append(turn)
            elif turn not in self.turns._queue:
                self.line = [other for other in self.line if other is not turn]

    def send(self, turn: Turn, num_parts: int) -> None:
        assert num_parts <= min(2, self.num_waiting[turn])
        assert self.line in ([], [turn]) or self.line[0] is turn, "who asked first sends first"
        self.line = [other for other in self.line if other is not turn]
        turn.sent(num_parts, self.now)
        self.num_waiting[turn] -= num_parts
        message = OnTheWay(turn, num_parts * self.turns.part_bytes, self.now)
        self.unanswered[turn].append(message)
        self.on_the_way.append(message)
        assert self.pace.in_flight_bytes <= self.pace.bound_bytes
        assert sum(message.num_bytes for message in self.unanswered[turn]) <= self.pace.bound_bytes

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.pace.in_flight_bytes == sum(message.num_bytes for message in self.on_the_way)
        assert self.turns.part_bytes <= self.pace.bound_bytes <= 4 * self.turns.part_bytes

    @invariant()
    def somebody_may_send_while_the_link_is_idle(self) -> None:
        """Who waits all the same waits for an answer of its own."""
        if self.pace.in_flight_bytes == 0:
            assert all(self.unanswered[turn] for turn, num_parts in self.num_waiting.items() if num_parts)

    @invariant()
    def only_who_has_something_to_send_is_in_line(self) -> None:
        assert all(self.num_waiting.get(turn) for turn in self.turns._queue)

    def teardown(self) -> None:
        for turn in self.num_waiting:
            turn.close()
        assert self.pace.in_flight_bytes == 0
        late = Turn(self.turns, lambda: None)
        assert late.num_parts(1) == 1, "nobody is left in the line"


TestSharedLink = SharedLink.TestCase
TestSharedLink.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


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
    turns = Turns(slab_bytes=1_024 - 76)
    told: list[str] = []
    silent = [Turn(turns, lambda: told.append("silent")) for _ in range(2)]
    for turn in silent:
        turn.sent(turn.num_parts(10_000), 1.0)
    other = Turn(turns, lambda: told.append("other"))
    assert other.num_parts(1) == 0
    other.arrived_before(2.0, 2.1)
    assert told[-1] == "other"
    assert other.num_parts(1) == 1
    for turn in (*silent, other):
        turn.close()
    assert turns.pace.in_flight_bytes == 0


def test_who_has_its_share_after_the_link_became_slow_lets_the_next_one_go() -> None:
    """It was first in line when there was room for more of its own; now its one unanswered part is as much as the link
    carries, and it waits for that answer beside the line."""
    turns = known_link(SLAB)
    (first, late, second), told = open_turns(turns, 3)
    first.sent(first.num_parts(1), 1.0)
    late.sent(late.num_parts(2), 1.0)
    assert (first.num_parts(9), second.num_parts(1)) == (0, 0)
    late.answered(60.0)
    assert turns.pace.bound_bytes == turns.part_bytes
    assert told[-1] == 0
    assert first.num_parts(9) == 0
    assert told[-1] == 2
    late.arrived_before(2.0, 60.0)
    assert second.num_parts(1) == 1
