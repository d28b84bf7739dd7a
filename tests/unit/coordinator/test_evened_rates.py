"""What equal nodes measure differs; what they are taken for does not."""

from __future__ import annotations

import math

import pytest

from coordinator.evened_rates import IDLE_S, EvenedRates
from coordinator.members import Members
from coordinator.pair_cost import PairCosts
from coordinator.work import Work
from kvrelay.cluster import NodeInfo, NodeRates, NodeStatus
from kvrelay.types import InstanceId, Role
from tests.support.fake_nodes import MODEL
from tests.support.pair_nodes import decode_node, prefill_node

A, B, C = (InstanceId(name) for name in "abc")


def busy(tokens_per_s: float) -> NodeStatus:
    return NodeStatus(ready=True, num_running=1, rates=NodeRates(prefill_tokens_per_s=tokens_per_s))


def idle(tokens_per_s: float) -> NodeStatus:
    return NodeStatus(ready=True, rates=NodeRates(prefill_tokens_per_s=tokens_per_s))


def evened(rates: EvenedRates, name: InstanceId, status: NodeStatus, now: float = 0.0) -> float:
    return rates.told(name, status, now).prefill_tokens_per_s


def test_a_node_alone_is_what_it_says() -> None:
    assert evened(EvenedRates(), A, busy(900.0)) == pytest.approx(900.0)


def test_what_was_not_measured_stays_unknown() -> None:
    rates = EvenedRates()
    rates.told(A, busy(900.0), 0.0)
    assert evened(rates, B, busy(0.0)) == 0.0
    assert rates.told(A, busy(900.0), 0.0).step_s == 0.0


def test_less_than_a_factor_of_two_from_the_median_is_the_median() -> None:
    rates = EvenedRates()
    rates.told(A, busy(1_000.0), 0.0)
    rates.told(B, busy(600.0), 0.0)
    assert evened(rates, C, busy(1_900.0)) == 1_000.0
    assert evened(rates, A, busy(1_000.0)) == 1_000.0
    assert evened(rates, B, busy(600.0)) == 1_000.0


def test_of_two_it_is_what_lies_between_them() -> None:
    rates = EvenedRates()
    rates.told(A, busy(400.0), 0.0)
    assert evened(rates, B, busy(900.0)) == pytest.approx(600.0)
    assert evened(rates, A, busy(400.0)) == pytest.approx(600.0)


def test_more_than_that_counts_by_so_much_less() -> None:
    rates = EvenedRates()
    rates.told(A, busy(1_000.0), 0.0)
    rates.told(B, busy(1_000.0), 0.0)
    assert evened(rates, C, busy(8_000.0)) == 4_000.0
    assert evened(rates, C, busy(100.0)) == 200.0


def test_a_node_that_was_long_idle_counts_as_the_others_until_it_has_worked() -> None:
    rates = EvenedRates()
    rates.told(A, busy(1_000.0), 0.0)
    rates.told(B, busy(1_000.0), 0.0)
    assert evened(rates, C, idle(10.0), now=5.0) == 20.0
    assert evened(rates, C, idle(10.0), now=5.0 + IDLE_S) == 1_000.0
    assert evened(rates, C, busy(10.0), now=6.0 + IDLE_S) == 20.0
    assert evened(rates, C, idle(10.0), now=7.0 + IDLE_S) == 20.0


@pytest.mark.parametrize("nonsense", [math.inf, math.nan])
def test_what_is_no_measure_is_none_for_others(nonsense: float) -> None:
    rates = EvenedRates()
    rates.told(A, busy(nonsense), 0.0)
    assert evened(rates, B, busy(100.0)) == pytest.approx(100.0)


def test_one_that_is_gone_is_no_measure_for_others() -> None:
    rates = EvenedRates()
    rates.told(A, busy(9_000.0), 0.0)
    rates.forget(A)
    assert evened(rates, B, busy(100.0)) == pytest.approx(100.0)


def test_of_equal_nodes_that_measured_differently_the_less_loaded_gets_the_request() -> None:
    """The quicker one would get all of them, were it quicker."""
    members = Members(timeout_s=10.0)
    for role, node in ((Role.PREFILL_NODE, prefill_node()), (Role.DECODE_NODE, decode_node(step_s=0.01))):
        for number, factor in enumerate((1.0, 1.5)):
            info = NodeInfo(role, InstanceId(f"{role.value}{number}"), f"{role.value}{number}:1", MODEL)
            told = node.status.rates
            rates = NodeRates(told.prefill_tokens_per_s * factor, told.handoff_bytes_per_s, 0.0, told.step_s / factor)
            status = NodeStatus(ready=True, blocks=node.status.blocks, num_slots_free=8, rates=rates)
            members.update(members.join(info, 0.0), status, 0.0)
    for member in members.all():  # what the others measured counts from a node's next status on
        members.update(member, member.status, 0.0)

    def chosen() -> list[str]:
        costs = PairCosts(
            members.usable(Role.PREFILL_NODE), members.usable(Role.DECODE_NODE), Work(1_000, 1_100, 16, 1_024, {}, {})
        )
        best = costs.ranked()[0]
        taken = [member for member in (best.prefill, best.decode) if member is not None]
        for member in taken:
            member.assign(0)
        return [member.info.instance_id for member in taken]

    first, second = chosen(), chosen()
    assert not set(first) & set(second)


def test_where_rates_are_not_used_nothing_counts_as_measured() -> None:
    members = Members(timeout_s=10.0, uses_rates=False)
    member = members.join(NodeInfo(Role.PREFILL_NODE, A, "a:1", MODEL), 0.0)
    members.update(member, busy(900.0), 0.0)
    assert member.load.token_s == 0.0
    assert member.status.rates.prefill_tokens_per_s == 900.0
