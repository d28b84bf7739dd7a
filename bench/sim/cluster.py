"""A cluster in virtual time, and one run of a load through it."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from bench.sim.clock import VirtualClock
from bench.sim.coordinating import Coordinator
from bench.sim.decoding import DecodeNode
from bench.sim.load import Arrival, block_hashes
from bench.sim.pairs import PairCost
from bench.sim.placing import Placing
from bench.sim.prefilling import PrefillNode
from bench.sim.reporting import Reports
from bench.sim.request import NOT_LET_IN, SimRequest
from bench.sim.reserving import Full, Reserving
from bench.sim.shapes import NodeShape
from coordinator.admission import Admission
from coordinator.fairness import DeficitRounds
from coordinator.members import Member, Members
from coordinator.places import Places
from coordinator.retry_advice import RetryAdvice
from coordinator.slo import NO_TARGETS, Targets, targets_of
from coordinator.tenant_policy import TenantPolicies
from kvrelay.cluster import ModelInfo, NodeInfo, NodeStatus
from kvrelay.inference import GenerateRequest
from kvrelay.kv.layout import KVLayout
from kvrelay.kv.pool import BlockPool
from kvrelay.types import InstanceId, RequestId, Role

_NEVER_SILENT_S = 1e12


@dataclass(frozen=True, slots=True)
class Setup:
    """Of one run; `placing` and `reserving` make new policies, which remember nothing of another run."""

    num_prefill: int = 6
    num_decode: int = 3
    shape: NodeShape = field(default_factory=NodeShape)
    placing: Callable[[], Placing] = PairCost
    reserving: Callable[[], Reserving] = Full
    policies: TenantPolicies = field(default_factory=TenantPolicies)
    targets: Targets = NO_TARGETS  # that all requests name; what they do not is their tenant's
    max_queue: int = 256
    max_queue_wait_s: float = 60.0
    max_returns: int = 0  # how often one that is turned away comes back, when it was told to
    times_decisions: bool = False


@dataclass(slots=True)
class Run:
    """What came of a load. `requests` in order of their end."""

    seconds: float  # virtual, to the last end
    requests: list[SimRequest]
    prefill_tokens: list[int]  # computed, by prefill node
    decode_rows: list[int]  # tokens drawn, by decode node
    queued: list[dict[str, int]]  # places taken, by tenant, once a second while requests arrive
    decisions_s: list[float]
    num_reserves: int
    returns: list[bool]  # of those that came back when they were told to, while the load lasted: whether they got in
    num_events: int
    processor_s: float


class Simulation:
    """The seed settles when each node's statuses are due."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.clock = VirtualClock()
        self._setup = setup
        self._draw = random.Random(seed)
        self._places = Places(setup.policies, setup.max_queue)
        self._members = Members(timeout_s=_NEVER_SILENT_S)
        self.coordinator = Coordinator(
            self.clock,
            setup.shape,
            self._members,
            Admission(self._places, DeficitRounds(setup.policies.weight), RetryAdvice()),
            placing=setup.placing(),
            reserving=setup.reserving(),
            targets_of=self._targets_of,
            weight_of=setup.policies.weight,
            max_queue_wait_s=setup.max_queue_wait_s,
            times_decisions=setup.times_decisions,
            ended=self._ended,
        )
        self._requests: list[SimRequest] = []
        self._queued: list[dict[str, int]] = []
        self._tenants: list[str] = []
        self._returns: list[bool] = []
        self._load_ends_at = 0.0
        self._unique = itertools.count(1)
        self._num_hashes = 0
        for number in range(setup.num_prefill):
            self._add_prefill(number)
        for number in range(setup.num_decode):
            self._add_decode(number)

    def run(self, arrivals: Sequence[Arrival]) -> Run:
        started = time.process_time()
        start_s = self._start_s()
        self._tenants = list(Counter(arrival.tenant for arrival in arrivals))
        self._load_ends_at = start_s + arrivals[-1].at
        self._come(iter(arrivals), start_s)
        self._look()
        self.clock.run()
        coordinator = self.coordinator
        return Run(
            seconds=max(request.ended_at or 0.0 for request in self._requests) - start_s,
            requests=self._requests,
            prefill_tokens=[node.num_computed_tokens for node in coordinator.prefill.values()],
            decode_rows=[node.num_row_steps for node in coordinator.decode.values()],
            queued=self._queued,
            decisions_s=coordinator.decisions_s,
            num_reserves=coordinator.num_reserves,
            returns=self._returns,
            num_events=self.clock.num_events,
            processor_s=time.process_time() - started,
        )

    def check_empty(self) -> None:
        """After a run nothing is left of any request: raises PoolCorruptError or AssertionError."""
        for node in (*self.coordinator.prefill.values(), *self.coordinator.decode.values()):
            node.pool.check()
            counts = node.pool.counts()
            assert counts.held + counts.reserved == 0, f"{counts} after the run"
        assert self._places.num_taken == 0, f"{self._places.num_taken} places are taken after the run"

    def _targets_of(self, tenant: str) -> Targets:
        named = self._setup.targets
        request = GenerateRequest(None, ttft_target_s=named.ttft_s, itl_target_s=named.itl_s)
        return targets_of(request, self._setup.policies.of(tenant))

    def _start_s(self) -> float:
        """By then every node has told its first status."""
        return self._setup.shape.status_interval_s + 2 * self._setup.shape.call_s

    def _come(self, arrivals: Iterator[Arrival], start_s: float) -> None:
        """One at a time, so that few events wait."""
        arrival = next(arrivals, None)
        if arrival is not None:
            self.clock.at(start_s + arrival.at, self._arrive, arrival, arrivals, start_s)

    def _arrive(self, arrival: Arrival, arrivals: Iterator[Arrival], start_s: float) -> None:
        block_tokens = self._setup.shape.block_tokens
        hashes = block_hashes(arrival, block_tokens, self._num_hashes)
        self._num_hashes += len(hashes)
        request_id = RequestId(f"r{next(self._unique)}")
        self.coordinator.ask(SimRequest(request_id, arrival, block_tokens, hashes))
        self._come(arrivals, start_s)

    def _ended(self, request: SimRequest) -> None:
        may_return = request.outcome in NOT_LET_IN and request.num_returns < self._setup.max_returns
        if may_return and request.told_s and self.clock.now + request.told_s <= self._load_ends_at:
            self.clock.after(request.told_s, self._return, request)
            return
        request.hashes = []
        self._requests.append(request)

    def _return(self, request: SimRequest) -> None:
        request.num_returns += 1
        request.outcome = None
        self.coordinator.ask(request)
        self._returns.append(request.outcome not in NOT_LET_IN)

    def _look(self) -> None:
        self._queued.append({tenant: self._places.taken(tenant).num_places for tenant in self._tenants})
        if self.clock.now < self._load_ends_at:
            self.clock.after(1.0, self._look)

    def _add_prefill(self, number: int) -> None:
        member = self._join(Role.PREFILL_NODE, number)
        node = PrefillNode(
            self.clock,
            self._setup.shape,
            handed_over=self.coordinator.handed_over,
            refused=self.coordinator.prefill_refused,
            changed=lambda: reports.changed(),
        )
        reports = self._reports(member, node.pool, node.status)
        self.coordinator.prefill[member.info.instance_id] = node

    def _add_decode(self, number: int) -> None:
        member = self._join(Role.DECODE_NODE, number)
        node = DecodeNode(
            self.clock,
            self._setup.shape,
            began=self.coordinator.began,
            finished=self.coordinator.finished,
            changed=lambda: reports.changed(),
        )
        reports = self._reports(member, node.pool, node.status)
        self.coordinator.decode[member.info.instance_id] = node

    def _reports(self, member: Member, pool: BlockPool, status: Callable[[], NodeStatus]) -> Reports:
        shape = self._setup.shape
        return Reports(
            self.clock,
            pool,
            status,
            seen=partial(self.coordinator.seen, member),
            told=partial(self.coordinator.told, member),
            interval_s=shape.status_interval_s,
            call_s=shape.call_s,
            first_at=self._draw.uniform(0.0, shape.status_interval_s),
        )

    def _join(self, role: Role, number: int) -> Member:
        name = InstanceId(f"{role.value}-{number}")
        member = self._members.join(NodeInfo(role, name, name, _model(self._setup.shape)), 0.0)
        self.coordinator.joined(member)
        return member


def _model(shape: NodeShape) -> ModelInfo:
    layout = KVLayout(
        num_layers=1, num_kv_heads=1, head_dim=shape.token_bytes // 4, dtype="float16", block_tokens=shape.block_tokens
    )
    return ModelInfo("none", "ab" * 32, "none", 1 << 30, 100_000, (2,), layout, "float16", "none")


def simulate(setup: Setup, arrivals: Sequence[Arrival], seed: int = 0) -> Run:
    """One load through one cluster; what is left of it afterwards is an error."""
    simulation = Simulation(setup, seed)
    run = simulation.run(arrivals)
    simulation.check_empty()
    return run
