"""How a request finds room, with nodes that answer when the test says."""

from __future__ import annotations

import asyncio
from typing import Any

from coordinator.admission import Admission
from coordinator.answer import Answer
from coordinator.cluster import Cluster
from coordinator.fairness import DeficitRounds
from coordinator.lifetime import Edge, Lifetime
from coordinator.members import Member, Members
from coordinator.placement import Limits, Placement, Placer
from coordinator.places import Places
from coordinator.request import AcceptedRequest, RequestState
from coordinator.retry_advice import RetryAdvice
from coordinator.tenant_policy import TenantPolicies
from coordinator.tenants import CacheScope
from kvrelay.cluster import NodeInfo, NodeRates, NodeStatus
from kvrelay.messages import ReservationGranted
from kvrelay.sampling import SamplingParams
from kvrelay.types import BlockCounts, InstanceId, RequestId, ReservationId, Role
from tests.support.fake_nodes import MODEL

PROMPT_IDS = tuple(range(3, 103))


class NoText:
    def token_bytes(self, token_id: int) -> bytes:
        return b""


class HeldNodes:
    """In the place of connections: every Reserve call is granted when the test lets them go, all in one moment."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.num_asked = 0
        self.released: list[str] = []

    async def reserve(self, address: str, *request: Any) -> ReservationGranted:
        self.num_asked += 1
        number = self.num_asked
        await self.may_answer.wait()
        return ReservationGranted(ReservationId(f"r{number}"), InstanceId("d1"), 0, lease_s=10.0)

    def release(self, address: str, reservation_id: ReservationId) -> None:
        self.released.append(reservation_id)


class Placing:
    """A decode node with room for all, and prefill nodes p1, p2 and so on with so many slots each."""

    def __init__(self, *slots: int) -> None:
        self.nodes = HeldNodes()
        self.admission = Admission(
            Places(TenantPolicies(), 10, 0), DeficitRounds(lambda tenant: 1.0, quantum_tokens=100), RetryAdvice()
        )
        self.cluster = Cluster(Members(timeout_s=600.0), self.nodes, self.admission.changed)  # type: ignore[arg-type]
        self.decode = self._join(Role.DECODE_NODE, "d1", 64)
        self.prefill = [self._join(Role.PREFILL_NODE, f"p{number}", free) for number, free in enumerate(slots, 1)]

    def begin(self, request_id: str) -> asyncio.Task[Placement | None]:
        sampling = SamplingParams(max_tokens=10)
        accepted = AcceptedRequest(
            *(RequestId(request_id), RequestId(request_id), PROMPT_IDS, sampling, MODEL),
            scope=CacheScope(b"", "default", None),
        )
        state = RequestState(accepted, Answer(NoText(), sampling, ()), 0.0)
        limits = Limits(60.0, 3, 32, 5.0, 600.0)
        lifetime = Lifetime(lambda *edge: None)
        lifetime.take(Edge.ACCEPTED)
        placer = Placer(state, self.cluster, self.admission, limits, lifetime)
        placer.enter(front=False)
        return asyncio.create_task(placer.place())

    def _join(self, role: Role, name: str, slots: int) -> Member:
        member = self.cluster.join(NodeInfo(role, InstanceId(name), name, MODEL))
        rates = NodeRates(prefill_tokens_per_s=1_000.0, step_s=0.01) if role is Role.PREFILL_NODE else NodeRates()
        blocks = BlockCounts(total=1_000, free=1_000)
        self.cluster.update(member, NodeStatus(ready=True, blocks=blocks, num_slots_free=slots, rates=rates))
        return member


async def placed(placing: Placing, names: str) -> list[asyncio.Task[Placement | None]]:
    """All asked for room before any of them got it, in one moment; those that go on waiting are not done."""
    tasks = [placing.begin(name) for name in names]
    async with asyncio.timeout(60):
        while placing.nodes.num_asked < len(names):
            await asyncio.sleep(0)
        placing.nodes.may_answer.set()
        while not any(task.done() for task in tasks):
            await asyncio.sleep(0)
        for _ in range(20):  # turns of the loop, in which nobody waits for anything but room
            await asyncio.sleep(0)
    return tasks


async def end(placing: Placing, tasks: list[asyncio.Task[Placement | None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    placing.cluster.close()


async def test_tries_of_one_moment_go_to_as_many_prefill_nodes() -> None:
    placing = Placing(1, 1, 1)
    tasks = await placed(placing, "abc")
    placements = [task.result() for task in tasks]
    assert [one.prefill.info.address for one in placements if one and one.prefill] == ["p1", "p2", "p3"]
    assert [member.load.assigned for member in placing.prefill] == [(100,), (100,), (100,)]
    await end(placing, tasks)


async def test_a_reservation_for_which_others_of_the_same_moment_left_no_prefill_slot_is_given_back() -> None:
    placing = Placing(1, 1)
    tasks = await placed(placing, "abc")
    assert [task.done() for task in tasks] == [True, True, False]
    assert placing.nodes.released == ["r3"]
    placing.cluster.update(placing.prefill[1], placing.prefill[1].status)  # its slot is free again
    async with asyncio.timeout(60):
        placement = await tasks[2]
    assert placement is not None
    assert placement.prefill is placing.prefill[1]
    assert placing.nodes.released == ["r3"]
    await end(placing, tasks)
