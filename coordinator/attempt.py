"""One attempt to compute an answer: a decode node's stream, and beside it the prefill that feeds it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext

from coordinator.candidates import prefill_candidates
from coordinator.circuits import failed_between
from coordinator.cluster import Cluster
from coordinator.ending import end_all
from coordinator.lifetime import Edge, Lifetime
from coordinator.members import Member
from coordinator.placement import Limits, Placement
from coordinator.request import RequestState, may_succeed_elsewhere
from kvrelay.errors import AlreadyCommittedError, KVRelayError, OverloadedError, UnavailableError
from kvrelay.inference import TokensGenerated
from kvrelay.messages import DecodeFinished, HandoffTarget, PrefillFinished, PrefillStarted
from kvrelay.sampling import GeneratedToken
from kvrelay.types import BlockHash, CachedTokens, InstanceId

logger = logging.getLogger(__name__)

MAX_PREFILLS_A_RESERVATION = 2  # when so many prefill nodes failed against one decode node, the fault is likely there
RETRY_PAUSE_S = 0.1  # before nodes that all just failed are asked again; doubles each time
VERDICT_WAIT_S = 0.1  # for the decode node's stream to fail too, before a prefill node's failure counts
ACCOUNTS_WAIT_S = 1.0  # for a prefill node's account of an answer that is complete already

OnRetry = Callable[[str], None]  # "prefill" or "decode": what kind of node failed


class NoPrefillSlotError(OverloadedError):
    """Between the reservation and the prefill every prefill node became busy: back to the queue, nothing failed."""


class Attempt:
    """Runs once, on one placement. `emit` takes what the client gets."""

    def __init__(
        self,
        state: RequestState,
        cluster: Cluster,
        limits: Limits,
        lifetime: Lifetime,
        *,
        emit: Callable[[TokensGenerated], None],
        on_retry: OnRetry,
    ) -> None:
        self._state = state
        self._cluster = cluster
        self._limits = limits
        self._lifetime = lifetime
        self._emit = emit
        self._on_retry = on_retry
        self._first_at = 0.0  # when the first token of the attempt came

    async def run(self, placement: Placement | None) -> None:
        """Returns when the answer is complete. Whatever it raises, nothing it started goes on."""
        self._state.begin_attempt()
        if placement is None:
            self._lifetime.take(Edge.PREFILL_SENT, "no decode node: one token is left")
            finished = await self._prefill(None, None)
            if finished is not None:
                self._take((finished.first_token,))
            return
        self._note_placement(placement)
        where = f"to {placement.address}, {placement.granted.num_cached_blocks} blocks cached there"
        try:
            if placement.is_tail:
                self._lifetime.take(Edge.TAIL_SENT, where)
                await self._decode(placement)
            else:
                self._lifetime.take(Edge.PREFILL_SENT, where)
                await self._hand_over(placement)
        except BaseException:
            # The node may not have been asked for the answer before this was cancelled; releasing twice is harmless.
            self._cluster.nodes.release(placement.address, placement.granted.reservation_id)
            raise

    def _note_placement(self, placement: Placement) -> None:
        account = self._state.account
        account.decode_node, account.num_blocks = placement.address, placement.num_blocks
        account.computed_on_decode = placement.is_tail

    async def _hand_over(self, placement: Placement) -> None:
        decode = asyncio.create_task(self._decode(placement))
        prefill = asyncio.create_task(self._prefill(placement, decode))
        try:
            await asyncio.wait({decode, prefill}, return_when=asyncio.FIRST_COMPLETED)
            if not decode.done() and not self._state.has_begun:
                await prefill  # raises what it failed with
            await decode
            await asyncio.wait({prefill}, timeout=ACCOUNTS_WAIT_S)
        finally:
            await end_all((decode, prefill), "an attempt")

    async def _decode(self, placement: Placement) -> None:
        """Reads the answer's tokens until it is complete."""
        try:
            with self._cluster.trying(placement.decode):
                await self._read_answer(placement)
        except KVRelayError as error:
            self._cluster.failed(error, placement.decode)
            raise

    async def _read_answer(self, placement: Placement) -> None:
        client, limit_s = self._cluster.nodes.decode(placement.address), self._limits.request_timeout_s
        started = time.monotonic()

        def take(tokens: tuple[GeneratedToken, ...]) -> bool:
            if not self._state.has_begun:
                self._note_begin(placement, time.monotonic() - started)
            self._take(tokens)
            return not self._state.answer.stop_string

        async with (
            self._cluster.while_member(placement.decode),
            client.decode(placement.granted.reservation_id, placement.is_tail, timeout_s=limit_s) as answer,
        ):
            finished = await answer.read(take)
        if finished is not None:
            self._end_answer(finished, placement)

    def _note_begin(self, placement: Placement, compute_s: float) -> None:
        """Of a tail: as seen from here, for an answer that a stop string ends before the decode node gives its own
        account."""
        self._cluster.succeeded(placement.decode)
        if not placement.is_tail:
            return
        num_cached = placement.granted.num_cached_blocks * self._state.accepted.model.layout.block_tokens
        self._state.note_cached(CachedTokens(device=num_cached))
        self._state.account.prefill_s = compute_s

    def _end_answer(self, event: DecodeFinished, placement: Placement) -> None:
        if placement.is_tail:
            self._state.note_cached(event.cached)
            self._state.account.prefill_s = event.compute_s
        self._came_last()
        self._send(self._state.answer.end(event.reason))

    async def _prefill(self, placement: Placement | None, decode: asyncio.Task[None] | None) -> PrefillFinished | None:
        """Has some prefill node compute the prompt; None when, after a failure, `decode` shows that it does not matter:
        tokens came, or it failed too, which explains this failure. None also when a retry finds that an earlier node's
        KV arrived after all, though its word of that was lost: that node's account stands."""
        num_failures, number, busy = 0, 0, set[InstanceId]()
        wanted = placement.prefill if placement else None
        account, decode_node = self._state.account, placement.decode if placement else None
        while True:
            noted = account.cached, account.prefill_node
            hashes = self._state.hashes()
            try:
                member = self._wanted_node(wanted, decode_node) or self._next_prefill_node(decode_node, busy)
            except KVRelayError:
                if num_failures and await self._is_settled(decode):
                    return None
                raise
            number, wanted = number + 1, None
            try:
                return await self._prefill_on(member, hashes, placement, number)
            except OverloadedError:
                busy.add(member.info.instance_id)
                self._cluster.refused(member, hashes)
            except AlreadyCommittedError:
                account.cached, account.prefill_node = noted
                return None
            except KVRelayError as error:
                if await self._is_settled(decode):
                    return None
                self._blame(error, member, decode_node)
                num_failures += 1
                if placement is not None and num_failures >= MAX_PREFILLS_A_RESERVATION:
                    raise
                self._retry_prefill(member, error)
                await self._pause_if_all_failed(decode_node)

    def _blame(self, error: KVRelayError, prefill: Member, decode: Member | None) -> None:
        """A handoff that failed is no fault of the prefill node, which would serve another decode node well."""
        parties = (prefill, decode) if decode is not None and failed_between(error) else (prefill,)
        self._cluster.failed(error, *parties)
        self._state.avoid.add(tuple(member.info.instance_id for member in parties))

    async def _is_settled(self, decode: asyncio.Task[None] | None) -> bool:
        """Whether the decode node's stream says how the attempt goes on. A dead decode node is often seen by the
        prefill node a moment earlier."""
        if decode is None:
            return False
        if not self._state.has_begun:
            await asyncio.wait({decode}, timeout=VERDICT_WAIT_S)
        return decode.done() or self._state.has_begun

    async def _prefill_on(
        self, member: Member, hashes: list[BlockHash], placement: Placement | None, number: int
    ) -> PrefillFinished:
        """`number` counts the attempts to fill one reservation."""
        if placement is None or number > 1 or member is not placement.prefill:  # whose place is taken
            num_blocks = self._cluster.cached(member.info.role, hashes).get(member.info.instance_id, 0)
            num_cached = num_blocks * self._state.accepted.model.layout.block_tokens
            self._cluster.assigned(member, hashes, max(1, self._state.num_tokens - num_cached))
        num_stored = self._cluster.stored.num_blocks(hashes)
        link = self._cluster.trying(member, placement.decode) if placement else nullcontext()
        with self._cluster.trying(member), link:
            return await self._read_prefill(member, placement, number, num_stored)

    async def _read_prefill(
        self, member: Member, placement: Placement | None, number: int, num_stored: int
    ) -> PrefillFinished:
        """`num_stored` are the leading blocks that the store may have."""
        target = _target(placement, number) if placement else None
        client, limit_s = self._cluster.nodes.prefill(member.info.address), self._limits.request_timeout_s
        async with (
            self._cluster.while_member(member),
            client.prefill(self._state.node_request(), target, timeout_s=limit_s) as events,
        ):
            async for event in events:
                if isinstance(event, PrefillStarted):
                    self._state.note_started(member.info.address, event.cached)
                    self._note_loaded(num_stored, event.cached)
                else:
                    self._state.note_prefill(member.info.address, event)
                    self._cluster.succeeded(member)
                    if placement is not None:
                        self._cluster.succeeded(member, placement.decode)
                    return event
        raise UnavailableError(f"prefill node {member.info.address} ended its stream before the prompt was computed")

    def _note_loaded(self, num_stored: int, cached: CachedTokens) -> None:
        accepted, block_tokens = self._state.accepted, self._state.accepted.model.layout.block_tokens
        num_reusable = min(num_stored, (self._state.num_tokens - 1) // block_tokens) * block_tokens
        num_expected = max(0, num_reusable - cached.device)
        self._cluster.stored.loaded(accepted.tenant, num_expected, cached.memory + cached.disk)

    def _wanted_node(self, wanted: Member | None, decode: Member | None) -> Member | None:
        """The prefill node that the placement was made with, which took a place there, if it may still go there."""
        if wanted is None or not self._cluster.members.is_usable(wanted.info.instance_id):
            return None
        return None if self._state.avoids(wanted, decode) else wanted

    def _next_prefill_node(self, decode: Member | None, busy: set[InstanceId]) -> Member:
        candidates = prefill_candidates(self._state, self._cluster, decode)
        free = [member for member in candidates if member.info.instance_id not in busy]
        if free:
            return free[0]
        if candidates:
            raise NoPrefillSlotError("every prefill node is busy")
        raise UnavailableError("no prefill node is ready")

    def _retry_prefill(self, member: Member, error: KVRelayError) -> None:
        """Counts a retry, or raises `error` when there is none left or none would help."""
        count_retry(self._state, "prefill", member.info.address, error, self._limits, self._on_retry)
        self._lifetime.take(Edge.PREFILL_RETRIED, f"{member.info.address} failed: {error.message}")

    async def _pause_if_all_failed(self, decode: Member | None) -> None:
        candidates = prefill_candidates(self._state, self._cluster, decode)
        if all(self._state.avoids(member, decode) for member in candidates):
            await asyncio.sleep(RETRY_PAUSE_S * 2**self._state.account.num_retries)

    def _take(self, tokens: tuple[GeneratedToken, ...]) -> None:
        if not self._state.has_begun:
            account = self._state.account
            self._lifetime.take(Edge.FIRST_TOKEN, f"from {account.decode_node or account.prefill_node}")
            self._came_first()
            if account.first_token_at is None:
                account.first_token_at = self._first_at
        self._send(self._state.answer.add(tokens))

    def _came_first(self) -> None:
        """The first token, against what was forecast: a retried attempt would tell of failures."""
        self._first_at, placed = time.monotonic(), self._state.placed_forecast
        if placed is not None and not self._state.account.num_retries:
            self._cluster.calibration.first_token(placed, self._first_at)

    def _came_last(self) -> None:
        placed, num_gaps = self._state.placed_forecast, len(self._state.answer.token_ids) - 1
        if placed is not None and not self._state.account.num_retries and num_gaps > 0:
            self._cluster.calibration.ended(placed, (time.monotonic() - self._first_at) / num_gaps)

    def _send(self, generated: TokensGenerated) -> None:
        if generated.tokens or generated.text:
            self._emit(generated)


def count_retry(
    state: RequestState, kind: str, address: str, error: KVRelayError, limits: Limits, on_retry: OnRetry
) -> None:
    """Raises `error` when it must not be, or was too often, tried again."""
    if not may_succeed_elsewhere(error) or state.account.num_retries >= limits.max_retries:
        raise error
    state.account.num_retries += 1
    on_retry(kind)
    logger.warning("%s: retry %d, %s failed: %s", state.request_id, state.account.num_retries, address, error)


def _target(placement: Placement, attempt: int) -> HandoffTarget:
    granted = placement.granted
    return HandoffTarget(
        placement.address, granted.instance_id, granted.reservation_id, attempt, granted.num_cached_blocks
    )
