"""The event loop's side of a decode node: who holds what, until when, and where its tokens go.

Service and receiver are its two doors, the engine thread its back room. Every request ends in `end`, whatever ended
it, and `end` is what gives the blocks back.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from decode_node.admission import check_fits, check_request, fork_request
from decode_node.commands import Commands
from decode_node.engine import BlocksWanted, Cache, DecodeCore, EngineLoad, StepDone
from decode_node.leases import LeaseTimer
from decode_node.loader import BlockLoader
from decode_node.metrics import DecodeMetrics
from decode_node.reservations import Entry, Phase, Reservations
from decode_node.streams import TokenStream
from kvrelay.cluster import ModelInfo, NodeStatus
from kvrelay.engine.loop import EngineLoop
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import KVRelayError, NotFoundError, OverloadedError, UnavailableError
from kvrelay.kv.block_store import BlockStore
from kvrelay.kv.hashing import chain_root
from kvrelay.kv.offload import Offer, offer_nothing
from kvrelay.kv.pool import Reservation
from kvrelay.limits import DecodeLimits
from kvrelay.matchers import Matchers, matcher_of
from kvrelay.messages import DecodeFinished, NodeRequest, ReservationGranted
from kvrelay.sampling import GeneratedToken
from kvrelay.types import BlockId, InstanceId, ReservationId

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class Request:
    """A live reservation, its way out, and how the handoff that fills it is interrupted."""

    entry: Entry
    stream: TokenStream
    interrupted: asyncio.Event  # of the latest handoff: set once it may not write any more
    loading: asyncio.Task[None] | None = None  # writes into its blocks what the kvstore has of them


def _nothing() -> None:
    pass


class DecodeNode:
    """Belongs to the event loop, except `deliver`'s argument, which the engine made and lets go."""

    def __init__(
        self,
        *,
        engine: EngineLoop[DecodeCore],
        info: ModelInfo,
        cache: Cache,
        instance_id: InstanceId,
        metrics: DecodeMetrics,
        limits: DecodeLimits,
        lease_s: float = 10.0,
        load: Callable[[], EngineLoad] = EngineLoad,
        changed: Callable[[], None] = _nothing,
        offer: Offer = offer_nothing,
        store: BlockStore | None = None,
        matchers: Matchers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limits` are those the core starts with. `load` reads the core's latest; `changed` is told whenever `status`
        did; `offer` gets blocks to offload, and `store` gives them back to preempted requests. `matchers` hold answers
        to what they are held to."""
        self.engine = engine
        self.info = info
        self.cache = cache
        self.instance_id = instance_id
        self.metrics = metrics
        self.reservations = Reservations(lease_s)
        self._requests: dict[ReservationId, Request] = {}
        self._limits = limits
        self._commands = Commands(engine, changed)
        self._load = load
        self._changed = changed
        self._offer = offer
        self._matchers = matchers
        self._loader = BlockLoader(engine, cache, store, metrics, clock) if store is not None else None
        self.clock = clock
        self._lease_timer = LeaseTimer(self.reservations, self.expire_leases, clock)
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to watch the engine: should it die, every request fails at once."""
        self._watch = asyncio.create_task(self._watch_engine())

    async def reserve(
        self, request: NodeRequest, num_tokens: int, num_tokens_now: int = 0, itl_target_s: float = 0.0
    ) -> ReservationGranted:
        """Sets blocks aside for `num_tokens_now` of `num_tokens`, or (0) for as many of them as the limits say. Prompts
        beside the answer leave it a token every `itl_target_s` (0: as the node's own target says).

        Raises InvalidRequestError and its kin for what is wrong, NeverFitsError for what is too large for this node,
        OverloadedError for what does not fit now, UnavailableError while the node drains or is stuck.
        """
        self._check_ready()
        check_request(request, num_tokens, self.info, num_tokens_now)
        check_fits(self.info.layout.blocks_for(num_tokens), self._load().blocks.total)
        sequence = await self._sequence(request)
        sequence.itl_target_s = itl_target_s
        self._check_taken()
        reservation_id = ReservationId(uuid.uuid4().hex)
        reserved = await self._set_aside(
            reservation_id, sequence, self._num_blocks(request, num_tokens, num_tokens_now)
        )
        sequence.num_computed_tokens = reserved.num_cached * sequence.block_tokens
        sequence.num_registered_blocks = reserved.num_cached
        return self._grant(reservation_id, sequence, tuple(reserved.block_ids), reserved.num_cached)

    async def fork(self, reservation_id: ReservationId, index: int) -> ReservationGranted:
        """Another answer to the prompt that a reservation was granted for, drawn by the seed of (its seed, index).

        It is a reservation of its own, with an answer of its own; it shares the blocks of the first one's
        prompt. Raises NotFoundError if they are not committed and here, OverloadedError if there is no room.
        """
        self._check_ready()
        parent = self.reservations.get(reservation_id).sequence
        request = fork_request(parent.request, index)
        sequence, fork_id = await self._sequence(request), ReservationId(uuid.uuid4().hex)
        sequence.itl_target_s = parent.itl_target_s
        self._check_taken()
        num_tokens = min(request.num_prompt_tokens + (request.sampling.max_tokens or 0), self.info.max_model_len)
        num_blocks = self._num_blocks(request, num_tokens)
        await self._ask_engine(fork_id, lambda core: core.fork(reservation_id, fork_id, sequence, num_blocks))
        granted = self._grant(fork_id, sequence, (), sequence.num_reusable_blocks)
        self.reservations.committed(fork_id)
        return granted

    async def set_limits(self, limits: DecodeLimits) -> DecodeLimits:
        """Replaces the limits between two steps; who holds blocks keeps them. Raises InvalidRequestError."""
        limits.validate()
        await self.engine.call(lambda core: core.set_limits(limits))
        self._limits = limits
        self._changed()
        return limits

    def renew(self, reservation_id: ReservationId) -> float:
        """Seconds until the lease lapses now. Raises NotFoundError."""
        return self.reservations.renew(reservation_id, self.clock())

    def open(self, reservation_id: ReservationId, *, compute_tail: bool) -> TokenStream:
        """The tokens of a reservation, whose lease cannot lapse from now on: whoever reads them has to `end` it.

        Raises as Reservations.open; UnavailableError, ending it, when the engine does not run.
        """
        entry = self.reservations.open(reservation_id, compute_tail=compute_tail)
        try:
            if compute_tail:
                self._command(entry, self._newcomer(lambda core: core.compute(reservation_id, entry.sequence)))
            elif entry.phase in (Phase.COMMITTING, Phase.COMMITTED):
                self._command(entry, self._newcomer(lambda core: core.run(reservation_id)))
        except KVRelayError as error:
            self.end(reservation_id, error)
            raise
        return self._requests[reservation_id].stream

    def begin_receive(self, reservation_id: ReservationId, attempt: int) -> Request:
        """A handoff begins; an older one under way is interrupted. Raises StaleError."""
        self.reservations.begin_receive(reservation_id, attempt, self.clock())
        request = self._requests[reservation_id]
        request.interrupted.set()
        request.interrupted = asyncio.Event()
        return request

    def begin_commit(
        self, reservation_id: ReservationId, attempt: int, first_token: GeneratedToken
    ) -> asyncio.Future[None]:
        """The prompt's KV is written and proven: the first token goes out, the engine takes over.

        The future is done when the engine has. Raises StaleError if the attempt is over.
        """
        entry = self.reservations.begin_commit(reservation_id, attempt, self.clock())
        sequence, stream = entry.sequence, self._requests[reservation_id].stream
        sequence.num_computed_tokens = sequence.num_tokens
        sequence.append(first_token.token_id)
        reason = sequence.finish_reason(self.info.eos_token_ids, self.info.max_model_len)
        stream.push(first_token)
        if reason is not None:
            stream.finish(DecodeFinished(reason))
        run, finished = entry.decoding, reason is not None
        commit = self._newcomer(lambda core: core.commit(reservation_id, sequence, run=run, finished=finished))
        done = self._command(entry, commit)
        done.add_done_callback(lambda _: self.reservations.committed(reservation_id))
        return done

    def end(self, reservation_id: ReservationId, error: KVRelayError) -> None:
        """Ends a reservation: its blocks go back, its stream fails with `error` if someone still reads. Once."""
        if self.reservations.end(reservation_id) is not None:
            self._ended(reservation_id, error)

    def deliver(self, output: object) -> None:
        """Takes a step's results from the engine loop."""
        assert isinstance(output, StepDone)
        for preempted in output.preempted:
            logger.info(
                "reservation %s gave its blocks to an older one: %d tokens to hold again, by %s",
                *(preempted.reservation_id, preempted.num_tokens, preempted.resume.value),
            )
            self._offer(preempted.to_keep, urgent=True)
        for wanted in output.to_load:
            request = self._requests.get(wanted.reservation_id)
            if request is not None:
                request.loading = asyncio.create_task(self._load_blocks(wanted))
        if output.preempted:
            self._changed()
        for advanced in output.advanced:
            request = self._requests.get(advanced.reservation_id)
            if request is None:
                continue
            if advanced.token is not None:
                request.stream.push(advanced.token)
            if advanced.finished is not None:
                request.stream.finish(advanced.finished)
            if advanced.error is not None:
                request.stream.fail(advanced.error)
        self.metrics.stepped(output)
        if output.filled:
            self._offer(output.filled)

    def status(self) -> NodeStatus:
        load = self._load()
        return NodeStatus(
            ready=self.ready,
            not_ready_reason=self._not_ready_reason,
            draining=self._draining,
            blocks=load.blocks,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_slots_free=self._num_slots_free(load),
            num_reservations=self.reservations.num_pending,
            limits=self._limits,
            rates=load.rates,
            num_waiting_tokens=load.num_waiting_tokens,
            step_tokens=load.step_tokens,
        )

    def _num_slots_free(self, load: EngineLoad) -> int:
        if not self.ready or load.num_preempted:
            return 0
        return max(0, self._limits.max_requests - self._num_taken)

    def end_if_stuck(self) -> None:
        """Fails every request once the engine is stuck, so that each is resumed elsewhere; for a watchdog to call.

        Their blocks are given back when, and if, the engine comes to it.
        """
        if self._requests and self.engine.stuck(self.clock()):
            logger.error("the engine is stuck; %d requests are given up", len(self._requests))
            self._end_all(UnavailableError("the decode node's engine is stuck; resume on another"))

    @property
    def ready(self) -> bool:
        """Takes new requests."""
        return not self._not_ready_reason

    @property
    def _not_ready_reason(self) -> str:
        if self._draining:
            return "draining"
        if self.engine.died:
            return "the engine has died"
        return "the engine is stuck" if self.engine.stuck(self.clock()) else ""

    async def drain(self, deadline_s: float) -> None:
        """Takes nothing new; returns when the last request has ended, after `deadline_s` at the latest.

        What still runs then fails as UnavailableError, so that it is resumed elsewhere.
        """
        self._draining = True
        self._changed()
        try:
            async with asyncio.timeout(deadline_s):
                await self._empty.wait()
        except TimeoutError:
            logger.warning("%d requests did not end within %.1f s and are dropped", len(self._requests), deadline_s)
            self._end_all(UnavailableError("the decode node is shutting down; resume on another"))

    async def close(self) -> None:
        """Ends what is left; the engine is stopped by whoever started it."""
        self._draining = True
        if self._watch is not None:
            self._watch.cancel()
        self._end_all(UnavailableError("the decode node has shut down; resume on another"))
        self._lease_timer.close()

    @property
    def _num_taken(self) -> int:
        return len(self._requests) + self._commands.num_asking

    async def _set_aside(self, reservation_id: ReservationId, sequence: Sequence, num_blocks: int) -> Reservation:
        """Asks the engine, which comes to it between two steps; nothing stays with it if nobody waits any more."""
        prefix = tuple(sequence.block_hashes[: sequence.num_reusable_blocks])
        return await self._ask_engine(reservation_id, lambda core: core.reserve(reservation_id, prefix, num_blocks))

    async def _ask_engine(self, reservation_id: ReservationId, fn: Callable[[DecodeCore], T]) -> T:
        return await self._commands.ask(reservation_id, fn, self._check_ready)

    def _grant(
        self, reservation_id: ReservationId, sequence: Sequence, block_ids: tuple[BlockId, ...], num_cached: int
    ) -> ReservationGranted:
        entry = self.reservations.grant(reservation_id, sequence, block_ids, num_cached, self.clock())
        self._requests[reservation_id] = Request(entry, TokenStream(), asyncio.Event())
        self._empty.clear()
        self._lease_timer.arm()
        self._changed()
        return ReservationGranted(reservation_id, self.instance_id, num_cached, self.reservations.lease_s)

    async def _sequence(self, request: NodeRequest) -> Sequence:
        matcher = await matcher_of(request, self._matchers)
        layout = self.info.layout
        root = chain_root(self.info.fingerprint, layout.fingerprint, request.tenant_salt)
        return Sequence.create(request, root, layout.block_tokens, matcher)

    def _num_blocks(self, request: NodeRequest, num_tokens: int, num_tokens_now: int = 0) -> int:
        """To set aside now for a request that may grow to `num_tokens`: for `num_tokens_now`, unless that is 0."""
        by_limits = self._limits.num_reserved(len(request.token_ids), num_tokens)
        return self.info.layout.blocks_for(num_tokens_now or by_limits)

    def _check_taken(self) -> None:
        most = self._limits.max_requests
        if self._num_taken >= most:
            raise OverloadedError(f"{self._num_taken} requests hold blocks here; at most {most} may")

    def _check_ready(self) -> None:
        if not self.ready:
            raise UnavailableError(f"this decode node is not ready: {self._not_ready_reason}; reserve on another")

    def _command(self, entry: Entry, fn: Callable[[DecodeCore], None]) -> asyncio.Future[None]:
        """Submits; a failure reaches the request's stream."""
        return self._commands.submit(fn, self._requests[entry.reservation_id].stream.fail)

    def _newcomer(self, fn: Callable[[DecodeCore], None]) -> Callable[[DecodeCore], None]:
        """`fn`, which lets a sequence in; the core hears how long the step that runs kept it waiting."""
        asked_at = self.clock()

        def let_in(core: DecodeCore) -> None:
            core.came(asked_at)
            fn(core)

        return let_in

    def _ended(self, reservation_id: ReservationId, error: KVRelayError) -> None:
        request = self._requests.pop(reservation_id)
        request.stream.fail(error)
        request.interrupted.set()
        if request.loading is None or request.loading.done():
            self._commands.give_back(reservation_id)
        else:  # only when nothing writes into the blocks any more may they go to others
            request.loading.cancel()
            request.loading.add_done_callback(lambda _: self._commands.give_back(reservation_id))
        if not self._requests:
            self._empty.set()
        self._changed()

    async def _load_blocks(self, wanted: BlocksWanted) -> None:
        assert self._loader is not None, "the engine wants blocks of a kvstore that is not there"
        try:
            await self._loader.load(wanted)
        except Exception as error:
            logger.exception("blocks of reservation %s could not be loaded", wanted.reservation_id)
            self._requests[wanted.reservation_id].loading = None
            self.end(wanted.reservation_id, KVRelayError(f"a preempted request could not come back: {error}"))

    def _end_all(self, error: KVRelayError) -> None:
        for reservation_id in self.reservations.ids:
            self.end(reservation_id, error)

    def expire_leases(self) -> None:
        """Ends every reservation whose lease has lapsed."""
        for entry in self.reservations.expire(self.clock()):
            logger.info("reservation %s lapsed while %s", entry.reservation_id, entry.phase.value)
            self.metrics.lease_lapsed()
            self._ended(
                entry.reservation_id, NotFoundError(f"the lease of reservation {entry.reservation_id} has lapsed")
            )

    async def _watch_engine(self) -> None:
        await self.engine.wait_ended()
        self._end_all(UnavailableError("the decode node's engine has died; resume on another"))
        self._changed()
