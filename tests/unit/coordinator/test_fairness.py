"""Turns by weight, over tokens."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.fairness import DeficitRounds

QUANTUM = 100
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


class Backlogs:
    """What waits, by tenant, and the turns that it had."""

    def __init__(self, **sizes: list[int]) -> None:
        self.rounds = DeficitRounds(lambda tenant: WEIGHTS[tenant], QUANTUM)
        self.waiting = {tenant: deque[int]() for tenant in WEIGHTS}
        for tenant, tokens in sizes.items():
            self.add(tenant, *tokens)

    def add(self, tenant: str, *sizes: int) -> None:
        self.waiting[tenant].extend(sizes)
        self.rounds.wait(tenant)

    def turn(self) -> str:
        tenant = self.rounds.next()
        assert tenant is not None
        self.rounds.charge(tenant, self.waiting[tenant].popleft())
        if not self.waiting[tenant]:
            self.rounds.rest(tenant)
        return tenant

    def turns(self, num_turns: int) -> str:
        return "".join(self.turn() for _ in range(num_turns))


def test_nobody_waits_nobody_has_a_turn() -> None:
    assert Backlogs().rounds.next() is None


def test_equal_requests_go_by_weight() -> None:
    backlogs = Backlogs(a=[50] * 20, b=[50] * 20, c=[50] * 20)
    assert backlogs.turns(14) == "aabbbbcaabbbbc"


def test_tokens_count_and_not_requests() -> None:
    backlogs = Backlogs(a=[100] * 4, b=[20] * 40)
    assert backlogs.turns(22) == "a" + "b" * 10 + "a" + "b" * 10


def test_a_large_request_goes_at_once_and_is_paid_for_in_the_rounds_after() -> None:
    backlogs = Backlogs(a=[350, 100], b=[200] * 6)
    assert backlogs.turns(7) == "abbbabb"


def test_one_that_comes_goes_behind_those_that_wait() -> None:
    backlogs = Backlogs(a=[100] * 3, b=[200] * 3)
    assert backlogs.turns(1) == "a"
    backlogs.add("c", 50)
    assert backlogs.turns(5) == "bacba"


def test_debt_outlives_an_empty_queue_until_rounds_have_paid_it() -> None:
    """Or else one large request at a time would take more than a tenant's share."""
    backlogs = Backlogs(a=[500], b=[200] * 20)
    assert backlogs.turns(3) == "abb"
    backlogs.add("a", 100)
    assert backlogs.turns(4) == "bbba", "of 400 one round has paid 100"


def test_credit_of_an_empty_queue_lapses() -> None:
    backlogs = Backlogs(a=[10], b=[200] * 20)
    assert backlogs.turns(11) == "a" + "b" * 10
    backlogs.add("a", *[100] * 10)
    assert backlogs.turns(6) == "bababa"


def test_what_is_refunded_can_be_used_and_no_more_than_a_quantum_of_it() -> None:
    backlogs = Backlogs(a=[1000, *[50] * 30], b=[200] * 20)
    assert backlogs.turns(4) == "abbb"
    backlogs.rounds.refund("a", 1000)
    assert backlogs.turns(6) == "aabaab"


def test_tenants_that_owe_nothing_are_forgotten() -> None:
    rounds = DeficitRounds(lambda tenant: 1.0, QUANTUM)
    for number in range(1_000):
        rounds.wait(f"t{number}")
        assert rounds.next() == f"t{number}"
        rounds.charge(f"t{number}", 10)
        rounds.rest(f"t{number}")
    assert rounds.num_accounts < 100


def test_those_that_owe_are_not_looked_through_at_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand tenants that owe for long would make each turn a thousand times as dear."""
    looks = Counter[str]()
    monkeypatch.setattr(DeficitRounds, "_account", counted(DeficitRounds._account, looks))
    rounds = DeficitRounds(lambda tenant: 1.0, QUANTUM)
    for number in range(1_000):
        rounds.wait(f"t{number}")
        assert rounds.next() == f"t{number}"
        rounds.charge(f"t{number}", 10_000_000)
        rounds.rest(f"t{number}")
    assert rounds.num_accounts == 1_000
    assert looks.total() < 10_000


def counted(account: Callable[..., Any], looks: Counter[str]) -> Callable[..., Any]:
    def count(rounds: DeficitRounds, tenant: str) -> Any:
        looks[tenant] += 1
        return account(rounds, tenant)

    return count


SIZES = st.lists(st.integers(1, 700), min_size=1, max_size=60)


@given(st.fixed_dictionaries(dict.fromkeys(WEIGHTS, SIZES)), st.integers(0, 40))
def test_over_any_time_in_which_two_wait_their_tokens_go_by_weight(sizes: dict[str, list[int]], begin: int) -> None:
    """Within two quanta and each one's largest request: tokens by weight, from any turn to any later one, while both
    have more waiting."""
    backlogs = Backlogs(**sizes)
    served: Counter[str] = Counter()
    for number in itertools.count():
        if sum(map(bool, backlogs.waiting.values())) < 2:
            break
        if number == begin:
            served.clear()
        before = {tenant: sum(waiting) for tenant, waiting in backlogs.waiting.items()}
        tenant = backlogs.turn()
        served[tenant] += before[tenant] - sum(backlogs.waiting[tenant])
        still = [name for name, waiting in backlogs.waiting.items() if waiting]
        if number >= begin:
            for one, other in itertools.combinations(still, 2):
                apart = abs(served[one] / WEIGHTS[one] - served[other] / WEIGHTS[other])
                largest = max(sizes[one]) / WEIGHTS[one] + max(sizes[other]) / WEIGHTS[other]
                assert apart < 2 * QUANTUM + largest


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 700)), min_size=1, max_size=80), st.data())
def test_nobody_waits_for_ever(arrivals: list[tuple[str, int]], data: st.DataObject) -> None:
    """However requests come, come and go: between two turns of one that waits, each other has at most what the rounds
    that the one's debt takes give it, and one round, and one largest request."""
    backlogs = Backlogs()
    since: Counter[str] = Counter()  # tokens of others since the tenant's last turn, or since it began to wait
    for tenant, size in arrivals:
        if not backlogs.waiting[tenant]:
            since[tenant] = 0
        backlogs.add(tenant, size)
        for _ in range(data.draw(st.integers(0, 2))):
            if not any(backlogs.waiting.values()):
                break
            before = {name: sum(waiting) for name, waiting in backlogs.waiting.items()}
            served = backlogs.turn()
            tokens = before[served] - sum(backlogs.waiting[served])
            since[served] = 0
            for name in WEIGHTS:
                if name != served:
                    since[name] += tokens
        for name, waiting in backlogs.waiting.items():
            if waiting:
                num_rounds = 700 / (QUANTUM * WEIGHTS[name]) + 2
                others = [weight for other, weight in WEIGHTS.items() if other != name]
                assert since[name] <= sum(num_rounds * QUANTUM * weight + 700 for weight in others)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=12),
    st.lists(st.integers(1, 300), min_size=1, max_size=12),
    st.lists(st.integers(1, 300), max_size=12),
    st.integers(0, 12),
)
def test_what_others_get_before_a_tenants_last_is_known_within_a_round_and_a_request(
    own: list[int], others: list[int], thirds: list[int], num_turns: int
) -> None:
    backlogs = Backlogs(a=own, b=others, **({"c": thirds} if thirds else {}))
    for _ in range(min(num_turns, len(own) + len(others) + len(thirds) - 1)):
        backlogs.turn()
    if not backlogs.waiting["a"]:
        return
    ahead = sum(list(backlogs.waiting["a"])[:-1])
    predicted = {
        name: min(sum(backlogs.waiting[name]), backlogs.rounds.due_before(name, "a", ahead))
        for name in "bc"
        if backlogs.waiting[name]
    }
    before = {name: sum(backlogs.waiting[name]) for name in predicted}
    while len(backlogs.waiting["a"]) > 1 or backlogs.rounds.next() != "a":
        backlogs.turn()
    for name, tokens in predicted.items():
        had = before[name] - sum(backlogs.waiting[name])
        assert abs(had - tokens) <= 2 * QUANTUM * WEIGHTS[name] / WEIGHTS["c"] + 600


def test_a_look_leaves_no_account() -> None:
    backlogs = Backlogs(b=[1], c=[1])
    assert backlogs.rounds.due_before("b", "a", 1_000) == 2_000
    assert backlogs.rounds.num_accounts == 2
