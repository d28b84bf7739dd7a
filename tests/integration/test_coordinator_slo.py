"""Targets, budgets, prompt guards and expected lengths at a coordinator's door; the nodes say how fast they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvrelay.cluster import NodeRates
from kvrelay.errors import (
    BudgetSpentError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    TargetOutOfReachError,
)
from tests.support.coordinator_ends import Ends, ends, greedy
from tests.support.fake_nodes import ANSWER_IDS


async def tell(
    cluster: Ends, *, num_waiting_tokens: int = 0, tokens_per_s: float = 1_000.0, step_s: float = 0.02
) -> None:
    """What the nodes say of themselves from now on, and the coordinator knows."""
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    prefill.rates, decode.rates = NodeRates(prefill_tokens_per_s=tokens_per_s), NodeRates(step_s=step_s)
    prefill.num_waiting_tokens = num_waiting_tokens
    expected = {node.instance_id: (node.rates, node.num_waiting_tokens) for node in cluster.nodes}
    for node in cluster.nodes:
        node.tell()
    await cluster.until_status(
        lambda status: (
            expected
            == {one.info.instance_id: (one.status.rates, one.status.num_waiting_tokens) for one in status.nodes}
        )
    )


@asynccontextmanager
async def measured(**settings: Any) -> AsyncIterator[Ends]:
    """Nodes that compute 1,000 prompt tokens a second and a step in 20 ms: 0.1 s for the prompt of 100 tokens."""
    async with ends(**settings) as cluster:
        await tell(cluster)
        yield cluster


def outcomes(cluster: Ends, target: str) -> tuple[float, float, float]:
    """Refused, attained, missed."""
    names = ("refusals", "attained", "missed")
    return tuple(cluster.metric(f"kvrelay_slo_{name}_total", target=target) for name in names)  # type: ignore[return-value]


async def test_what_would_come_too_late_is_refused_without_asking_a_node_and_served_when_it_fits() -> None:
    async with measured() as cluster:
        await tell(cluster, num_waiting_tokens=100_000)  # one step, half of which is done
        with pytest.raises(OverloadedError, match=r"first token in about 50 s, more than the 30 s asked") as refused:
            await cluster.ask(ttft_target_s=30.0, request_id="one")
        assert refused.value.retry_after_s == pytest.approx((50.1 - 0.8 * 30) * 1.25)
        assert cluster.decode[0].reached["reserve"] == cluster.prefill[0].reached["start"] == 0
        assert cluster.metric("kvrelay_errors_total", code="overloaded") == 1
        assert (await cluster.ask(request_id="without a target")).token_ids == ANSWER_IDS
        await tell(cluster)
        assert (await cluster.ask(ttft_target_s=30.0, itl_target_s=30.0, request_id="one")).token_ids == ANSWER_IDS
        assert cluster.decode[0].itl_targets_s == [0.0, 30.0]
        assert outcomes(cluster, "ttft") == (1, 1, 0)
        assert outcomes(cluster, "itl") == (0, 1, 0)


async def test_a_target_that_no_wait_brings_in_reach_is_refused_without_a_time() -> None:
    async with measured() as cluster:
        why = r"0\.1 s of them without any wait; ask for a longer one"
        with pytest.raises(TargetOutOfReachError, match=why) as refused:
            await cluster.ask(ttft_target_s=0.05)
        assert refused.value.retry_after_s == 0
        assert not refused.value.retryable


async def test_the_pace_of_tokens_has_a_target_too() -> None:
    async with measured() as cluster:
        with pytest.raises(OverloadedError, match="a token every 20 ms on average, more than the 10 ms asked for"):
            await cluster.ask(itl_target_s=0.01)
        assert outcomes(cluster, "itl") == (1, 0, 0)


async def test_best_effort_runs_all_the_same_and_promises_nothing() -> None:
    async with measured() as cluster:
        answer = await cluster.ask(ttft_target_s=0.05, best_effort=True)
        assert answer.token_ids == ANSWER_IDS
        assert outcomes(cluster, "ttft") == (0, 0, 0)


async def test_best_effort_lets_its_tenants_others_pass() -> None:
    async with ends(blocks=10) as cluster:  # one request of 9 blocks at a time
        node = cluster.decode[0]
        node.at["token"].hold()
        asked = [asyncio.create_task(cluster.ask(sampling=greedy(max_tokens=40), request_id="first"))]
        await node.until_reached("token")
        for name in ("head", "best effort", "other"):  # the head was refused room and is passed by nobody
            best_effort = name == "best effort"
            asked.append(
                asyncio.create_task(
                    cluster.ask(sampling=greedy(max_tokens=40), request_id=name, best_effort=best_effort)
                )
            )
            await cluster.until_queued(len(asked) - 1)
            await cluster.decode[0].until_reached("reserve", times=2)
        node.at["token"].let_go()
        await asyncio.gather(*asked)
        served = [request.request_id.partition("#")[0] for request in node.requests]
        assert served == ["first", "head", "other", "best effort"]


async def test_a_tenants_targets_hold_for_requests_that_name_none() -> None:
    async with measured(tenants="default:ttft_s=0.05") as cluster:
        with pytest.raises(OverloadedError, match=r"more than the 0\.05 s asked for"):
            await cluster.ask()
        assert (await cluster.ask(ttft_target_s=60.0)).token_ids == ANSWER_IDS


async def test_without_anything_measured_everything_is_let_in() -> None:
    async with ends() as cluster:
        assert (await cluster.ask(ttft_target_s=1e-9, itl_target_s=1e-9)).token_ids == ANSWER_IDS
        assert outcomes(cluster, "ttft") == outcomes(cluster, "itl") == (0, 0, 1)


async def test_targets_that_make_no_sense_are_named() -> None:
    async with ends() as cluster:
        for name in ("ttft_target_s", "itl_target_s"):
            with pytest.raises(InvalidRequestError, match=f"{name} is -1; allowed is a number of seconds over 0"):
                await cluster.ask(**{name: -1.0})


@pytest.mark.parametrize(
    ("settings", "whose"),
    [
        ({"tenants": "default:max_prompt_tokens=99", "max_prompt_tokens": 900}, "tenant 'default' may send 99"),
        ({"tenants": "default:max_prompt_tokens=900", "max_prompt_tokens": 99}, "this coordinator takes 99"),
    ],
)
async def test_a_longer_prompt_than_allowed_is_refused_with_both_numbers(settings: dict[str, Any], whose: str) -> None:
    async with ends(**settings) as cluster:
        with pytest.raises(PromptTooLongError) as refused:
            await cluster.ask()
        assert refused.value.message == f"the prompt has 100 tokens; {whose}"


async def test_a_days_tokens_are_prompts_and_answers_and_then_nothing_new() -> None:
    async with ends(tenants="default:daily_tokens=291") as cluster:
        for num_used in (145, 290, 435):  # 100 of the prompt and 45 of the answer each; the third began within it
            await cluster.ask()
            ratio = cluster.metric("kvrelay_tenant_budget_used_ratio", tenant="default")
            assert ratio == pytest.approx(num_used / 291)
        with pytest.raises(BudgetSpentError, match="has used 435 of its 291 tokens a day") as refused:
            await cluster.ask()
        assert 0 < refused.value.retry_after_s <= 86_400
        assert cluster.metric("kvrelay_tenant_budget_alerts_total", tenant="default") == 1
        assert cluster.metric("kvrelay_errors_total", code="budget_spent") == 1


async def test_room_is_set_aside_for_answers_as_long_as_they_were_lately() -> None:
    async with ends(reserve="expected") as cluster:
        node = cluster.decode[0]
        for _ in range(20):
            await cluster.ask(sampling=greedy(max_tokens=200))
        assert node.max_reserved == 19, "300 positions"
        node.max_reserved = 0
        await cluster.ask(sampling=greedy(max_tokens=200))
        assert node.max_reserved == 10, "100 and 45"
