"""One request's way through the cluster: wait, reserve, prefill, decode; again elsewhere when a node is lost.

Who owns what: while a request waits it owns a ticket; from a granted Reserve on it owns a reservation, which ends with
its Decode call or by Release; its calls to nodes end with the attempt that made them. So whatever ends the flow's task
frees everything it holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from coordinator.admission import Admission, Ticket
from coordinator.answer import Answer
from coordinator.cluster import Cluster
from coordinator.lifetime import Edge, Lifetime
from coordinator.members import Member
from coordinator.router import has_slot, rank_decode, rank_prefill
from kvrelay.errors import CancelledError, KVRelayError, NotFoundError, OverloadedError, UnavailableError
from kvrelay.kv.hashing import block_hashes, chain_root
from kvrelay.kv.layout import ModelInfo
from kvrelay.types import (
    BlockHash,
    CachedTokens,
    DecodeFinished,
    HandoffTarget,
    InstanceId,
    NodeRequest,
    PrefillFinished,
    PrefillStarted,
    RequestFinished,
    RequestId,
    ReservationGranted,
    Role,
    SamplingParams,
    Timing,
    TokensDecoded,
    TokensGenerated,
    Usage,
)

logger = logging.getLogger(__name__)

MAX_PREFILLS_A_RESERVATION = 2  # when so many prefill nodes failed against one decode node, the fault is likely there
RETRY_PAUSE_S = 0.1  # before a node that just failed is asked again; doubles each time
ACCOUNTS_WAIT_S = 1.0  # for a prefill node's account of an answer that is complete already


@dataclass(frozen=True, slots=True)
class FlowLimits:
    max_queue_wait_s: float
    max_retries: int
    local_tail_tokens: int
    no_node_wait_s: float  # how long an accepted request waits while no node of a role it needs is there


@dataclass(frozen=True, slots=True)
class FlowRequest:
    """A request that passed validation: everything about it is settled."""

    request_id: RequestId
    node_request_id: RequestId  # what nodes know it by; unique among everything they run
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    model: ModelInfo
    tenant_salt: bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an attempt runs. Without a grant only the first token is wanted, which a prefill node gives alone."""

    decode: Member | None = None
    granted: ReservationGranted | None = None


@dataclass(slots=True)
class Account:
    """What the end of the request reports; a retry replaces what the failed attempt noted, never adds."""

    granted_at: float | None = None
    first_token_at: float | None = None
    cached: CachedTokens = field(default_factory=CachedTokens)
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    handoff_bytes: int = 0
    prefill_node: str = ""
    decode_node: str = ""
    num_retries: int = 0


class Flow:
    """Runs one request. `emit` takes what the client gets; `on_retry` hears what kind of node failed."""

    def __init__(
        self,
        request: FlowRequest,
        answer: Answer,
        cluster: Cluster,
        admission: Admission,
        limits: FlowLimits,
        lifetime: Lifetime,
        *,
        emit: Callable[[TokensGenerated], None],
        on_retry: Callable[[str], None],
    ) -> None:
        self.request = request
        self.answer = answer
        self.lifetime = lifetime
        self.account = Account()
        self._cluster = cluster
        self._admission = admission
        self._limits = limits
        self._emit = emit
        self._on_retry = on_retry
        self._accepted_at = self._now()
        self._turn = asyncio.Event()
        self._ticket: Ticket | None = None
        self._avoid: set[InstanceId] = set()
        self._num_tokens_before = 0  # of the answer, when the attempt began

    def enter(self) -> None:
        """Takes a place in the queue. Raises OverloadedError when it is full."""
        self._ticket = self._admission.enter(self._turn.set, self._now())
        self.lifetime.take(Edge.ACCEPTED)

    def leave(self) -> None:
        """Gives the place in the queue up, if it still has one."""
        if self._ticket is not None:
            self._admission.leave(self._ticket)
            self._ticket = None

    async def run(self) -> RequestFinished:
        """Raises KVRelayError when no complete answer is to be had."""
        queue_deadline = self._now() + self._limits.max_queue_wait_s
        while self.answer.reason is None:
            placement = await self._place(queue_deadline)
            self._num_tokens_before = len(self.answer.token_ids)
            try:
                await self._compute(placement)
            except _NoPrefillSlotError:
                self.lifetime.take(Edge.REFUSED)
                self._requeue(refused=True)
            except KVRelayError as error:
                if self.answer.reason is None:
                    self._prepare_retry(error, placement)
                    queue_deadline = self._now() + self._limits.max_queue_wait_s
        return self._finish()

    # -- waiting and reserving

    async def _place(self, deadline: float) -> Placement:
        """Waits until a node has room, at most until `deadline`."""
        absent_since: float | None = None
        try:
            async with asyncio.timeout_at(deadline) as waiting:
                while True:
                    await self._wait_for_turn(absent_since)
                    placement = await self._try_place()
                    if placement is not None:
                        return placement
                    absent_since = None if self._has_nodes() else absent_since or self._now()
        except TimeoutError as error:
            if not waiting.expired():
                raise
            raise OverloadedError(
                f"no node had room for the request within {self._limits.max_queue_wait_s:g} s; try again later",
                retry_after_s=self._admission.retry_after_s,
            ) from error

    async def _wait_for_turn(self, absent_since: float | None) -> None:
        patience = None if absent_since is None else absent_since + self._limits.no_node_wait_s
        try:
            async with asyncio.timeout_at(patience) as waiting:
                await self._turn.wait()
        except TimeoutError as error:
            if not waiting.expired():
                raise
            raise UnavailableError("every node that could run the request is gone or not ready") from error
        self._turn.clear()

    async def _try_place(self) -> Placement | None:
        assert self._ticket is not None
        self.lifetime.take(Edge.TRIED)
        placement = await self._ask_for_room()
        if placement is None:
            self.lifetime.take(Edge.REFUSED)
            self._admission.refused(self._ticket)
            return None
        self._admission.admitted(self._ticket, self._now())
        self._ticket = None
        if self.account.granted_at is None:
            self.account.granted_at = self._now()
        return placement

    async def _ask_for_room(self) -> Placement | None:
        hashes = self._hashes()
        slot = any(has_slot(member) for member in self._prefill_nodes(hashes))
        if self.answer.num_left == 1:
            return Placement() if slot else None
        cached = self._cluster.cached(Role.DECODE_NODE, hashes)
        if not slot and not self._is_tail(max(cached.values(), default=0)):
            return None  # a reservation would only idle
        for member in self._decode_nodes(hashes):
            granted = await self._reserve(member)
            if granted is None:
                continue
            if slot or self._is_tail(granted.num_cached_blocks):
                self._cluster.assigned(member, hashes)
                return Placement(member, granted)
            self._cluster.nodes.release(member.info.address, granted.reservation_id)
        return None

    async def _reserve(self, member: Member) -> ReservationGranted | None:
        """None when the node has no room or cannot be reached."""
        num_tokens = len(self.request.prompt_ids) + len(self.answer.token_ids) + self.answer.num_left
        try:
            async with self._cluster.while_member(member):
                return await self._cluster.nodes.reserve(member.info.address, self._node_request(), num_tokens)
        except OverloadedError:
            return None
        except KVRelayError as error:
            if not _lost(error):
                raise
            logger.warning("%s: reserving on %s failed: %s", self.request.request_id, member.info.address, error)
            self._avoid.add(member.info.instance_id)
            return None

    # -- computing

    async def _compute(self, placement: Placement) -> None:
        member, granted = placement.decode, placement.granted
        if member is None or granted is None:
            self.lifetime.take(Edge.PREFILL_SENT)
            finished = await self._prefill(None)
            if finished is not None:
                self._take_tokens(TokensDecoded((finished.first_token,)))
            return
        try:
            await self._compute_under(member, granted)
        except BaseException:
            # The Decode call may not have reached the node, or not have told it yet; releasing twice is harmless.
            self._cluster.nodes.release(member.info.address, granted.reservation_id)
            raise

    async def _compute_under(self, member: Member, granted: ReservationGranted) -> None:
        self.account.decode_node = member.info.address
        if self._is_tail(granted.num_cached_blocks):
            self.lifetime.take(Edge.TAIL_SENT)
            await self._decode(member, granted, compute_tail=True)
            return
        self.lifetime.take(Edge.PREFILL_SENT)
        decode = asyncio.create_task(self._decode(member, granted, compute_tail=False))
        prefill = asyncio.create_task(self._prefill(_Target(member.info.address, granted)))
        try:
            await asyncio.wait({decode, prefill}, return_when=asyncio.FIRST_COMPLETED)
            if not decode.done() and not self._has_begun():
                await prefill  # raises what the prefill failed with
            await decode
            await asyncio.wait({prefill}, timeout=ACCOUNTS_WAIT_S)
        finally:
            await _end(decode, prefill)

    async def _decode(self, member: Member, granted: ReservationGranted, *, compute_tail: bool) -> None:
        """Reads the answer's tokens until it is complete."""
        client = self._cluster.nodes.decode(member.info.address)
        async with (
            self._cluster.while_member(member),
            client.decode(granted.reservation_id, compute_tail=compute_tail) as events,
        ):
            async for event in events:
                match event:
                    case TokensDecoded():
                        self._take_tokens(event)
                        if self.answer.stop_string:
                            return
                    case DecodeFinished():
                        if compute_tail:
                            self._note_cached(event.cached)
                            self.account.prefill_s = event.compute_s
                        self._send(self.answer.end(event.reason))
                        return
        raise UnavailableError(f"decode node {member.info.address} ended its stream before the answer")

    async def _prefill(self, target: _Target | None) -> PrefillFinished | None:
        """Has some prefill node compute the prompt; None when tokens came although no node reported its success."""
        num_failures, attempt, busy = 0, 0, set[InstanceId]()
        while True:
            hashes = self._hashes()
            member = self._next_prefill_node(hashes, busy)
            attempt += 1
            try:
                async with self._cluster.while_member(member):
                    self._cluster.assigned(member, hashes)
                    return await self._prefill_on(member, target and target.attempt(attempt))
            except OverloadedError:
                busy.add(member.info.instance_id)
            except KVRelayError as error:
                if self._has_begun():
                    return None
                self._avoid.add(member.info.instance_id)
                num_failures += 1
                exhausted = target is not None and num_failures >= MAX_PREFILLS_A_RESERVATION
                if exhausted or not self._may_retry(error):
                    raise
                self._count_retry("prefill", member, error)
                self.lifetime.take(Edge.PREFILL_RETRIED)
                await self._pause_if_all_failed()

    async def _prefill_on(self, member: Member, target: HandoffTarget | None) -> PrefillFinished:
        client = self._cluster.nodes.prefill(member.info.address)
        async with client.prefill(self._node_request(), target) as events:
            async for event in events:
                match event:
                    case PrefillStarted():
                        self._note_cached(event.cached)
                    case PrefillFinished():
                        self._note_prefill(member, event)
                        return event
        raise UnavailableError(f"prefill node {member.info.address} ended its stream before the prompt was computed")

    def _next_prefill_node(self, hashes: list[BlockHash], busy: set[InstanceId]) -> Member:
        ranked = self._prefill_nodes(hashes)
        free = [member for member in ranked if member.info.instance_id not in busy]
        if free:
            return free[0]
        if ranked:
            raise _NoPrefillSlotError("every prefill node is busy")
        raise UnavailableError("no prefill node is ready")

    async def _pause_if_all_failed(self) -> None:
        if all(member.info.instance_id in self._avoid for member in self._prefill_nodes(())):
            await asyncio.sleep(RETRY_PAUSE_S * 2**self.account.num_retries)

    # -- tokens and accounts

    def _take_tokens(self, event: TokensDecoded) -> None:
        if not event.tokens:
            return
        if not self._has_begun():
            self.lifetime.take(Edge.FIRST_TOKEN)
        if self.account.first_token_at is None:
            self.account.first_token_at = self._now()
        self._send(self.answer.add(event.tokens))

    def _send(self, generated: TokensGenerated) -> None:
        if generated.tokens or generated.text:
            self._emit(generated)

    def _has_begun(self) -> bool:
        """Whether this attempt gave a token."""
        return len(self.answer.token_ids) > self._num_tokens_before

    def _note_cached(self, cached: CachedTokens) -> None:
        """Cached prompt tokens of the attempt that gave the first token; of a resumed answer nothing is new."""
        if self._num_tokens_before == 0:
            self.account.cached = _capped(cached, len(self.request.prompt_ids))

    def _note_prefill(self, member: Member, finished: PrefillFinished) -> None:
        self._note_cached(finished.cached)
        self.account.prefill_node = member.info.address
        self.account.prefill_s = finished.compute_s
        self.account.handoff_s = finished.handoff_s
        self.account.handoff_bytes = finished.handoff_bytes

    def _finish(self) -> RequestFinished:
        assert self.answer.reason is not None
        self.lifetime.take(Edge.FINISHED)
        account, now = self.account, self._now()
        return RequestFinished(
            reason=self.answer.reason,
            usage=Usage(len(self.request.prompt_ids), len(self.answer.token_ids), account.cached),
            timing=Timing(
                queue_s=(account.granted_at or now) - self._accepted_at,
                first_token_s=(account.first_token_at or self._accepted_at) - self._accepted_at,
                total_s=now - self._accepted_at,
                prefill_s=account.prefill_s,
                handoff_s=account.handoff_s,
            ),
            prefill_node=account.prefill_node,
            decode_node=account.decode_node,
            handoff_bytes=account.handoff_bytes,
            stop_string=self.answer.stop_string,
            retries=account.num_retries,
        )

    # -- retries

    def _prepare_retry(self, error: KVRelayError, placement: Placement) -> None:
        """Queues again, in front, or raises `error` when it must not or may not be tried again."""
        if not self._may_retry(error):
            raise error
        self._count_retry("decode" if placement.decode else "prefill", placement.decode, error)
        if placement.decode is not None:
            self._avoid.add(placement.decode.info.instance_id)
        self.lifetime.take(Edge.RESUMED)
        self._requeue(refused=False)

    def _requeue(self, *, refused: bool) -> None:
        self._turn.clear()
        self._ticket = self._admission.enter(self._turn.set, self._now(), front=True, refused=refused)

    def _may_retry(self, error: KVRelayError) -> bool:
        return _lost(error) and self.account.num_retries < self._limits.max_retries

    def _count_retry(self, kind: str, member: Member | None, error: KVRelayError) -> None:
        self.account.num_retries += 1
        self._on_retry(kind)
        where = member.info.address if member else "a prefill node"
        logger.warning("%s: retry %d after %s: %s", self.request.request_id, self.account.num_retries, where, error)

    # -- what the cluster offers this request

    def _has_nodes(self) -> bool:
        members = self._cluster.members
        needed = [Role.PREFILL_NODE] if self.answer.num_left == 1 else [Role.PREFILL_NODE, Role.DECODE_NODE]
        return all(members.usable(role) for role in needed)

    def _prefill_nodes(self, hashes: list[BlockHash] | tuple[()]) -> list[Member]:
        members = self._cluster.members.usable(Role.PREFILL_NODE)
        cached = self._cluster.cached(Role.PREFILL_NODE, hashes)
        num_blocks = self.request.model.layout.blocks_for(len(self._token_ids()))
        return rank_prefill(members, cached, num_blocks=num_blocks, avoid=self._avoid)

    def _decode_nodes(self, hashes: list[BlockHash]) -> list[Member]:
        members = self._cluster.members.usable(Role.DECODE_NODE)
        cached = self._cluster.cached(Role.DECODE_NODE, hashes)
        num_blocks = self.request.model.layout.blocks_for(len(self._token_ids()) + self.answer.num_left)
        return rank_decode(members, cached, num_blocks=num_blocks, avoid=self._avoid)

    def _token_ids(self) -> tuple[int, ...]:
        return (*self.request.prompt_ids, *self.answer.token_ids)

    def _hashes(self) -> list[BlockHash]:
        """Of the full blocks, as the nodes will hash them."""
        model, layout = self.request.model, self.request.model.layout
        root = chain_root(model.fingerprint, layout.fingerprint, self.request.tenant_salt)
        return block_hashes(root, self._token_ids(), layout.block_tokens)

    def _node_request(self) -> NodeRequest:
        return NodeRequest(
            request_id=self.request.node_request_id,
            token_ids=self._token_ids(),
            num_prompt_tokens=len(self.request.prompt_ids),
            sampling=replace(self.request.sampling, stop=()),
            tenant_salt=self.request.tenant_salt,
        )

    def _is_tail(self, num_cached_blocks: int) -> bool:
        """Whether the rest is so short that the decode node computes it itself."""
        num_cached = num_cached_blocks * self.request.model.layout.block_tokens
        return num_cached > 0 and len(self._token_ids()) - num_cached <= self._limits.local_tail_tokens

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class _NoPrefillSlotError(OverloadedError):
    """Between the reservation and the prefill every prefill node became busy: back to the queue, nothing failed."""


@dataclass(frozen=True, slots=True)
class _Target:
    """The decode node's side of a handoff."""

    address: str
    granted: ReservationGranted

    def attempt(self, number: int) -> HandoffTarget:
        return HandoffTarget(
            address=self.address,
            instance_id=self.granted.instance_id,
            reservation_id=self.granted.reservation_id,
            attempt=number,
            first_block=self.granted.num_cached_blocks,
        )


def _lost(error: KVRelayError) -> bool:
    """Whether another node, or the same one later, may succeed. A node that shuts down cancels what it runs, and a
    reservation that lapsed is not found."""
    return error.retryable or isinstance(error, CancelledError | NotFoundError)


def _capped(cached: CachedTokens, most: int) -> CachedTokens:
    """At most `most` tokens in all, the fastest tiers counted first."""
    device = min(cached.device, most)
    memory = min(cached.memory, most - device)
    return CachedTokens(device, memory, min(cached.disk, most - device - memory))


async def _end(*tasks: asyncio.Task[object]) -> None:
    """Cancels what still runs and waits for it, so that nothing of an attempt outlives it."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, KVRelayError):
            await task
