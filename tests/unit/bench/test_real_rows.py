"""What policies on real clusters are asked, and how it is judged."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from typing import Any, cast

import pytest

from bench.coordinator.real.asking import Asked, Asker, Goal, Seen, capacity_per_s, drawn, endless, greedy
from bench.coordinator.real.noting import Line, in_turn
from bench.coordinator.real.overload import _requests
from bench.handoff.samples import Samples
from kvrelay.client_answer import ClientAnswer

ASKED = Asked((1, 2, 3), greedy(4))


def seen(first_token_s: float, gaps_s: list[float], *, finished: bool = True) -> Seen:
    answer = ClientAnswer(0.0, first_token_s=first_token_s)
    answer.choices[0].gaps_s = gaps_s
    answer.finished = cast(Any, object()) if finished else None
    return Seen(ASKED, answer)


class SteadyAsker:
    """Answers end at the same pace, but the first ones, which take longer."""

    def __init__(self) -> None:
        self._num_asked = 0

    async def ask(self, asked: Asked) -> Seen:
        self._num_asked += 1
        ends_at = 10.0 + 0.25 * self._num_asked if self._num_asked > 2 else 5.0
        return Seen(asked, ClientAnswer(0.0), took_s=ends_at)


async def test_capacity_is_told_without_the_first_ends_and_the_last() -> None:
    requests = islice(endless(lambda number: ASKED), 20)
    assert await capacity_per_s(cast(Asker, SteadyAsker()), requests, 4) == pytest.approx(4.0)


def test_goodput_counts_complete_answers_that_met_both_targets() -> None:
    goal = Goal(1.0, 0.1)
    ones = [
        seen(0.9, [0.05, 0.15]),
        seen(1.1, [0.05]),
        seen(0.5, [0.05, 0.2]),
        seen(0.5, [0.05], finished=False),
        seen(0.5, []),
    ]
    assert [one.met(goal) for one in ones] == [True, False, False, False, True]
    samples = Samples()
    Line(samples, "table", "line").add_goodput(ones, goal, 4.0)
    assert samples.median(("table", "line", "goodput /s")) == pytest.approx(0.5)


def test_a_share_of_nothing_is_not_noted() -> None:
    samples = Samples()
    line = Line(samples, "table", "line")
    line.add_share("some", 1, 4)
    line.add_share("none", 0, 0)
    assert samples.values == {("table", "line", "some"): [25.0]}


def test_policies_come_in_the_other_order_every_other_round() -> None:
    assert [in_turn(("a", "b"), number) for number in (1, 2, 3)] == [("a", "b"), ("b", "a"), ("a", "b")]


def test_each_tenant_asks_for_its_share_of_tokens() -> None:
    tokens = Counter[str]()
    for asked in islice(_requests(1), 600):
        tokens[asked.tenant] += asked.num_tokens
    shares = {tenant: num_tokens / tokens.total() for tenant, num_tokens in tokens.items()}
    assert shares == {
        "chat": pytest.approx(1 / 2, abs=0.01),
        "code": pytest.approx(1 / 3, abs=0.01),
        "documents": pytest.approx(1 / 6, abs=0.01),
    }


def test_a_round_asks_the_same_whatever_the_policy() -> None:
    assert list(islice(_requests(3), 9)) == list(islice(_requests(3), 9))
    assert drawn(random.Random(1), 3) != drawn(random.Random(2), 3)
