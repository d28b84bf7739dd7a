"""Tokens a day, by a clock that the test sets."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry

from coordinator.budgets import DAY_S, MAX_TENANTS, DailyBudgets
from coordinator.policy_metrics import PolicyMetrics
from coordinator.tenant_policy import parse_policies
from kvrelay.errors import BudgetSpentError, OverloadedError
from tests.support.manual_clock import ManualClock

NOON = 20_000 * DAY_S + DAY_S // 2


class Day:
    """Budgets of "a" (100 tokens) and of everyone else (10), at noon."""

    def __init__(self, policies: str = "a:daily_tokens=100;free:;*:daily_tokens=10") -> None:
        self.clock = ManualClock(NOON)
        self.registry = CollectorRegistry()
        metrics = PolicyMetrics(self.registry, lambda tenant: "other" if tenant.startswith("t") else tenant)
        self.budgets = DailyBudgets(parse_policies(policies), self.clock, metrics)

    def used(self, label: str) -> float | None:
        return self.registry.get_sample_value("kvrelay_tenant_budget_used_ratio", {"tenant": label})

    def alerts(self, label: str) -> float | None:
        return self.registry.get_sample_value("kvrelay_tenant_budget_alerts_total", {"tenant": label})


def test_new_requests_are_refused_from_the_last_token_on_until_midnight() -> None:
    day = Day()
    day.budgets.spend("a", 99)
    day.budgets.check("a")
    day.budgets.spend("a", 30)  # what ran went on
    with pytest.raises(BudgetSpentError, match="tenant 'a' has used 129 of its 100 tokens a day") as refused:
        day.budgets.check("a")
    assert refused.value.retry_after_s == DAY_S / 2
    assert isinstance(refused.value, OverloadedError)
    assert refused.value.retryable
    day.budgets.check("b")
    day.clock.now += DAY_S / 2 - 1
    with pytest.raises(BudgetSpentError) as refused:
        day.budgets.check("a")
    assert refused.value.retry_after_s == 1
    day.clock.now += 1
    day.budgets.check("a")
    day.budgets.spend("a", 99)
    day.budgets.check("a")


def test_each_tenant_has_its_own_day_and_some_have_no_end() -> None:
    day = Day()
    day.budgets.spend("b", 10)
    day.budgets.spend("free", 10**9)
    with pytest.raises(BudgetSpentError):
        day.budgets.check("b")
    for tenant in ("a", "c", "free"):
        day.budgets.check(tenant)
    assert len(day.budgets) == 1


def test_a_warning_at_four_fifths_once_a_day(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "coordinator.budgets")
    day = Day()
    day.budgets.spend("a", 79)
    assert (day.used("a"), day.alerts("a"), caplog.messages) == (0.79, None, [])
    for _ in range(3):
        day.budgets.spend("a", 1)
    assert (day.used("a"), day.alerts("a")) == (0.82, 1)
    assert caplog.messages == [
        "tenant 'a' has used 80 of its 100 tokens a day; at all of them it gets nothing new until midnight UTC"
    ]
    day.clock.now += DAY_S
    day.budgets.check("b")
    assert day.used("a") is None, "nothing of the new day"
    day.budgets.spend("a", 500)
    assert (day.used("a"), day.alerts("a"), len(caplog.messages)) == (5.0, 2, 2)


def test_tenants_that_share_a_label_show_the_one_that_used_the_most() -> None:
    day = Day()
    day.budgets.spend("t1", 9)
    day.budgets.spend("t2", 1)
    assert day.used("other") == 0.9


def test_a_clock_that_is_set_back_gives_nothing_again() -> None:
    day = Day()
    day.budgets.spend("a", 100)
    day.clock.now += -DAY_S
    with pytest.raises(BudgetSpentError):
        day.budgets.check("a")


def test_a_clock_that_was_far_ahead_withholds_no_day_once_it_is_right() -> None:
    day = Day()
    day.clock.now += 40 * DAY_S
    day.budgets.spend("a", 100)
    day.clock.now += -40 * DAY_S
    day.budgets.check("a")
    day.budgets.spend("a", 100)
    with pytest.raises(BudgetSpentError):
        day.budgets.check("a")


def test_memory_is_bounded_in_tenants() -> None:
    day = Day()
    for number in range(MAX_TENANTS + 10):
        day.budgets.spend(f"t{number}", 1)
    assert len(day.budgets) == MAX_TENANTS
