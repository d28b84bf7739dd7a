"""Finding room for a request: its turn in the queue, then a decode node that grants its blocks."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from coordinator.admission import Admission
from coordinator.calibration import PlacedForecast
from coordinator.candidates import costs_of
from coordinator.cluster import Cluster
from coordinator.forecast import Forecast
from coordinator.lifetime import Edge, Lifetime
from coordinator.members import Member
from coordinator.pair import Pair
from coordinator.pair_cost import PairCosts
from coordinator.queue import Demand, Ticket
from coordinator.request import RequestState, may_succeed_elsewhere
from coordinator.router import has_slot
from coordinator.slo import Prediction
from coordinator.work import Work
from kvrelay.errors import KVRelayError, OverloadedError
from kvrelay.limits import DecodeLimits
from kvrelay.messages import ReservationGranted
from kvrelay.types import Role

logger = logging.getLogger(__name__)

MAX_CONSIDERED = 8  # pairs that are remembered for people to read


@dataclass(frozen=True, slots=True)
class Limits:
    max_queue_wait_s: float
    max_retries: int
    local_tail_tokens: int
    no_node_wait_s: float  # how long an accepted request waits while no node of a role it needs is there
    request_timeout_s: float  # of the whole request; a node's call gets it too, should our own end not reach it


@dataclass(frozen=True, slots=True)
class Placement:
    """A decode node that holds the request's blocks."""

    decode: Member
    granted: ReservationGranted
    # That was best for it, and counts it as assigned. None: the decode node computes what is not cached there.
    prefill: Member | None = None
    num_blocks: int = 0  # set aside there for the request

    @property
    def is_tail(self) -> bool:
        """The decode node computes what it lacks itself: little, or more than any prefill node could hold."""
        return self.prefill is None

    @property
    def address(self) -> str:
        return self.decode.info.address


class Placer:
    """One request's search for room. Owns its ticket."""

    def __init__(
        self, state: RequestState, cluster: Cluster, admission: Admission, limits: Limits, lifetime: Lifetime
    ) -> None:
        self._state = state
        self._cluster = cluster
        self._admission = admission
        self._limits = limits
        self._lifetime = lifetime
        self._turn = asyncio.Event()
        self._ticket: Ticket | None = None
        self._deadline = 0.0
        self._why_refused: list[str] = []
        self._num_cached: int | None = None  # blocks; None: not looked up yet

    def demand(self) -> Demand:
        """What it costs its tenant, as far as is known where its prompt is cached."""
        accepted = self._state.accepted
        num_uncached = len(accepted.prompt_ids) - self._num_blocks_cached() * accepted.model.layout.block_tokens
        num_given = len(self._state.token_ids)
        num_wanted = (self._state.num_positions_now or self._state.num_positions) - num_given
        num_tokens = max(num_uncached, 1) + num_wanted
        return Demand(accepted.tenant, num_tokens, accepted.priority)

    def _num_blocks_cached(self) -> int:
        """Leading blocks of the prompt that some node had when this was first asked."""
        if self._num_cached is None:
            hashes = self._state.hashes()
            caches = (self._cluster.cached(role, hashes) for role in (Role.PREFILL_NODE, Role.DECODE_NODE))
            self._num_cached = max((blocks for cache in caches for blocks in cache.values()), default=0)
        return self._num_cached

    def forecast(self) -> Forecast | None:
        """What the answer would get if it were placed now; None while nothing is measured, or nowhere is it to go."""
        return self._forecast(self._costs())

    def _forecast(self, costs: PairCosts) -> Forecast | None:
        pairs = costs.ranked()
        if not pairs or pairs[0].forecast is None:
            return None
        return self._cluster.calibration.correct(pairs[0].way, pairs[0].forecast)

    def predict(self) -> Prediction:
        """What it would get if it entered the queue now."""
        demand, now, costs = self.demand(), self._now(), self._costs()
        return Prediction(
            wait_s=self._admission.wait_s(demand, self._num_tokens_free(), now),
            forecast=self._forecast(costs),
            tokens_per_s=self._admission.tokens_per_s(now),
            num_tokens=demand.num_tokens,
            num_positions=self._state.num_positions,
            quickest_ttft_s=costs.least_ttft_s(),
            quickest_itl_s=costs.least_itl_s(),
        )

    def enter(self, *, front: bool) -> None:
        """Takes a place among its tenant's, or the first of all."""
        self._deadline = self._now() + self._limits.max_queue_wait_s
        enter = self._admission.enter_in_front if front else self._admission.enter
        self._ticket = enter(self._turn.set, self.demand(), self._now())

    def enter_again(self, *, refused: bool) -> None:
        """Takes the first place. `refused`: the attempt found no room after all (another coordinator's request may have
        been faster), so its wait goes on."""
        if not refused:
            self._deadline = self._now() + self._limits.max_queue_wait_s
        self._turn.clear()
        paid = Demand(self._state.accepted.tenant, num_tokens=0)
        self._ticket = self._admission.enter_in_front(self._turn.set, paid, self._now(), refused=refused)
        if refused:
            self._cluster.look_again()

    def leave(self) -> None:
        """Gives up the place in the queue, if it still has one."""
        if self._ticket is not None:
            self._admission.leave(self._ticket, self._now())
            self._ticket = None

    async def place(self) -> Placement | None:
        """Waits for room; None when the prefill node's first token is all that is left to compute.

        Raises OverloadedError when there was none for too long, UnavailableError when there are no nodes.
        """
        try:
            async with (
                asyncio.timeout_at(self._deadline) as waiting,
                self._cluster.presence.needed(self._roles_needed(), self._limits.no_node_wait_s),
            ):
                while True:
                    await self._turn.wait()
                    self._turn.clear()
                    found, placement = await self._try_once()
                    if found:
                        return placement
        except TimeoutError as error:
            if not waiting.expired():
                raise
            raise OverloadedError(
                f"no node had room for the request within {self._limits.max_queue_wait_s:g} s; try again later",
                retry_after_s=self._admission.retry_after_s(self._state.accepted.tenant),
            ) from error
        finally:
            self.leave()

    async def _try_once(self) -> tuple[bool, Placement | None]:
        assert self._ticket is not None
        self._lifetime.take(Edge.TRIED)
        self._why_refused = []
        found, placement = await self._ask_for_room()
        if found:
            self._admission.admitted(self._ticket, self._now())
            if self._state.account.granted_at is None:
                self._state.account.granted_at = time.monotonic()
        else:
            self._lifetime.take(Edge.REFUSED, "; ".join(self._why_refused))
            self._admission.refused(self._ticket, self._now())
            self._cluster.look_again()
        return found, placement

    async def _ask_for_room(self) -> tuple[bool, Placement | None]:
        costs = self._costs()
        pairs = costs.ranked()
        self._state.considered = pairs[:MAX_CONSIDERED]
        if not costs.has_slot:
            self._why_refused.append("no prefill node has a slot")
        if self._state.answer.num_left == 1 and not costs.outgrown:
            if costs.has_slot:
                self._note_forecast(pairs[0])
            return costs.has_slot, None
        for pair in pairs:
            if pair.decode is None or (pair.prefill is not None and not costs.has_slot):
                continue  # a reservation would only idle
            granted = await self._reserve(pair.decode)
            if granted is None:
                continue
            settled = costs.pair_with(pair.decode, granted.num_cached_blocks)
            if settled is not None and (settled.prefill is None or costs.has_slot):
                self._assign(pair.decode, granted.num_cached_blocks, settled, costs.work)
                return True, Placement(pair.decode, granted, settled.prefill, self._num_blocks_now(pair.decode))
            self._why_refused.append(f"{pair.decode.info.address}: had room, but no prefill node has a slot")
            self._cluster.nodes.release(pair.decode.info.address, granted.reservation_id)
            self._cluster.withdraw(pair.decode)
        return False, None

    def _assign(self, decode: Member, num_cached_blocks: int, pair: Pair, work: Work) -> None:
        """Counts the request on both nodes at once: other tries of this moment go on before its attempt begins."""
        num_cached = num_cached_blocks * self._state.accepted.model.layout.block_tokens
        num_tokens = max(1, self._state.num_tokens - num_cached) if pair.prefill is None else 0
        self._note_forecast(pair)
        self._cluster.assigned(decode, self._state.hashes(), num_tokens)
        if pair.prefill is not None:
            num_blocks = work.cached_prefill.get(pair.prefill.info.instance_id, 0)
            self._cluster.assigned(pair.prefill, self._state.hashes(), work.num_uncached(num_blocks))

    def _note_forecast(self, pair: Pair) -> None:
        """Notes what the pair is expected to give, for when it shows."""
        state, forecast, now = self._state, pair.forecast, time.monotonic()
        if forecast is None:
            state.placed_forecast = None
            return
        ttft_s = self._cluster.calibration.correct_s(pair.way, forecast.ttft_s)
        itl_s = self._cluster.calibration.correct_itl_s(forecast.itl_s)
        state.placed_forecast = PlacedForecast(pair.way, forecast.ttft_s, ttft_s, itl_s, now, forecast.itl_s)

    async def _reserve(self, member: Member) -> ReservationGranted | None:
        """None when the node has no room or cannot be reached."""
        state, address, request = self._state, member.info.address, self._state.node_request()
        try:
            with self._cluster.trying(member):
                async with self._cluster.while_member(member):
                    return await self._cluster.nodes.reserve(
                        *(address, request, state.num_positions, state.num_positions_now),
                        state.accepted.targets.itl_s or 0.0,
                    )
        except OverloadedError as error:
            self._why_refused.append(f"{address}: {error.message}")
            return None
        except KVRelayError as error:
            if not may_succeed_elsewhere(error):
                raise
            self._why_refused.append(f"{address}: {error.message}")
            party = (member.info.instance_id,)
            if party not in self._state.avoid:  # once, not at every try
                logger.warning("%s: reserving on %s failed: %s", self._state.request_id, address, error)
            self._state.avoid.add(party)
            self._cluster.failed(error, member)
            return None

    def _costs(self) -> PairCosts:
        return costs_of(
            *(self._state, self._cluster),
            local_tail_tokens=self._limits.local_tail_tokens,
            num_blocks_now=self._num_blocks_now,
        )

    def _num_tokens_free(self) -> int:
        """Room on decode nodes by their last status, if any prefill node would take the prompt."""
        members = self._cluster.members
        if not any(has_slot(member) for member in members.usable(Role.PREFILL_NODE)):
            return 0
        num_blocks = sum(member.status.blocks.available for member in members.usable(Role.DECODE_NODE))
        return num_blocks * self._state.accepted.model.layout.block_tokens

    def _num_blocks_now(self, member: Member) -> int:
        """What a decode node sets aside for the request when it admits it: what it is told to, or by its limits."""
        num_tokens, limits = self._state.num_positions_now or self._state.num_positions, member.status.limits
        if isinstance(limits, DecodeLimits) and not self._state.num_positions_now:
            num_tokens = limits.num_reserved(self._state.num_tokens, num_tokens)
        return self._state.accepted.model.layout.blocks_for(num_tokens)

    def _roles_needed(self) -> tuple[Role, ...]:
        return (Role.PREFILL_NODE,) if self._state.answer.num_left == 1 else (Role.PREFILL_NODE, Role.DECODE_NODE)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
