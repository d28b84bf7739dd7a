"""The event loop's half of a prefill node: one coroutine a request, from validation to its last block's commit."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Seq
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from kvrelay.cluster import ModelInfo, NodeStatus
from kvrelay.engine.loop import EngineLoop
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import InvalidRequestError, PromptTooLongError, UnavailableError
from kvrelay.kv.block_store import BlockStore
from kvrelay.kv.hashing import Buffer, chain_root
from kvrelay.kv.load_or_compute import LoadOrCompute
from kvrelay.kv.meeting import Meeting
from kvrelay.kv.offload import Offer, offer_nothing
from kvrelay.kv.prefix import count_cached
from kvrelay.limits import PrefillLimits
from kvrelay.matchers import Matchers, matcher_of
from kvrelay.messages import HandoffTarget, NodeRequest, PrefillFinished, PrefillStarted
from kvrelay.rpc import raw
from kvrelay.types import BlockCounts, BlockId, CachedTokens, check_token_id
from prefill_node.engine import PrefillCore, PrefillOutput
from prefill_node.links import DecodeLinks
from prefill_node.loading import PrefixLoad, PrefixLoader
from prefill_node.metrics import PrefillMetrics
from prefill_node.progress import Progress
from prefill_node.rates import PrefillRates
from prefill_node.scheduler import JobId
from prefill_node.sender import NO_HANDOFF, HandoffReport, HandoffSender

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVAccess:
    """How the event loop touches a job's blocks: plain memory, both. See `kvrelay.kv.cache.PagedKVCache`."""

    view_slabs: Callable[[Seq[BlockId], int, int], Seq[Buffer]]
    write_slab: Callable[[BlockId, Buffer], None]


class PrefillJobs:
    """Runs requests on the engine; knows how the node stands."""

    def __init__(
        self,
        engine: EngineLoop[PrefillCore],
        model: ModelInfo,
        kv: KVAccess,
        links: DecodeLinks,
        metrics: PrefillMetrics,
        *,
        stall_s: float,
        load_limit_s: float = 5.0,
        store: BlockStore | None = None,
        costs: LoadOrCompute | None = None,
        rates: PrefillRates | None = None,
        matchers: Matchers | None = None,
        offer: Offer = offer_nothing,
        on_status: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`costs` decide what is loaded, `rates` hear also what `links` carry, `matchers` hold answers to what they are
        held to, `offer` takes blocks to keep; `on_status` is told when `status` changed."""
        self._engine = engine
        self._model = model
        self._kv = kv
        self._links = links
        self._metrics = metrics
        self._stall_s = stall_s
        costs = costs or LoadOrCompute(model.layout.block_tokens)
        self._rates = rates or PrefillRates()
        self._loader = PrefixLoader(
            store, costs, kv.write_slab, metrics, limit_s=load_limit_s, on_loaded=self._loaded, clock=clock
        )
        self._matchers = matchers
        self._offer = offer
        self._on_status = on_status
        self._clock = clock
        self._ids = itertools.count(1)
        self._jobs: dict[JobId, Progress] = {}
        self._draining = False
        self._no_jobs = asyncio.Event()
        self._no_jobs.set()
        self._output = PrefillOutput((), BlockCounts(), 0, 0, 0)

    def take(self, output: PrefillOutput) -> None:
        """What the engine's steps tell."""
        for event in output.events:
            progress = self._jobs.get(event.job_id)
            if progress is not None:
                progress.take(event, self._clock())
        self._output = output
        self._loader.num_waiting_tokens = output.num_remaining_tokens
        self._metrics.step_bound(output.step_tokens)
        if output.num_step_tokens:
            self._loader.costs.computed(output.num_step_tokens, output.step_s)
            self._rates.computed(output.num_step_tokens, output.step_s)
        self._on_status()

    def status(self, *, ready: bool, not_ready_reason: str = "") -> NodeStatus:
        output = self._output
        return NodeStatus(
            ready=ready,
            not_ready_reason=not_ready_reason,
            draining=self._draining,
            blocks=output.blocks,
            num_running=output.num_running,
            num_waiting=output.num_waiting,
            num_slots_free=0 if self._draining else output.num_slots_free,
            limits=output.limits,
            rates=self._rates.rates(),
            num_waiting_tokens=output.num_waiting_tokens,
            step_tokens=output.step_tokens,
            prompt_tokens=output.prompt_tokens,
        )

    async def set_limits(self, limits: PrefillLimits) -> PrefillLimits:
        """Replaces the limits between two steps; prompts in work stay. Raises InvalidRequestError."""
        limits.validate()
        await self._engine.call(lambda core: core.set_limits(limits))
        return limits

    async def drain(self) -> None:
        """Takes no more jobs; returns when the last one has ended."""
        self._draining = True
        self._on_status()
        await self._no_jobs.wait()

    def fail_all(self, message: str) -> None:
        """The engine is gone: ends every job, whose caller may try another node."""
        for progress in self._jobs.values():
            progress.fail(UnavailableError(message))

    def fail_if_stuck(self) -> None:
        """The same while the engine is stuck; for a watchdog to call. Its blocks come back when the engine does."""
        if self._jobs and self._engine.stuck(self._clock()):
            logger.error("the engine is stuck; %d prompts are given up", len(self._jobs))
            self.fail_all("this prefill node's engine is stuck; use another node")

    async def run(
        self, request: NodeRequest, target: HandoffTarget | None
    ) -> AsyncGenerator[PrefillStarted | PrefillFinished, None]:
        """PrefillStarted, then PrefillFinished. Raises KVRelayError; closing or cancelling it frees everything."""
        self._check(request, target)
        matcher = await matcher_of(request, self._matchers)
        self._check_open()
        root = chain_root(self._model.fingerprint, self._model.layout.fingerprint, request.tenant_salt)
        sequence = Sequence.create(request, root, self._model.layout.block_tokens, matcher)
        job_id, progress = self._open_job()
        try:
            await progress.outcome(self._engine.submit(lambda core: core.submit(job_id, sequence)))
            await progress.admitted()
            load = self._loader.begin(sequence, progress)
            try:
                async with aclosing(self._compute(job_id, sequence, target, progress, load)) as events:
                    async for event in events:
                        yield event
            finally:
                await load.close()
        finally:
            # Nothing of this job reads or writes its blocks any more, so the engine may give them away.
            self._close_job(job_id)

    def _loaded(self, num_blocks: int, seconds: float) -> None:
        self._rates.loaded(num_blocks * self._model.layout.slab_bytes, seconds)

    # Ownership of a job

    def _open_job(self) -> tuple[JobId, Progress]:
        job_id, progress = JobId(next(self._ids)), Progress()
        self._jobs[job_id] = progress
        self._no_jobs.clear()
        return job_id, progress

    def _close_job(self, job_id: JobId) -> None:
        self._engine.post(lambda core: core.end(job_id))
        del self._jobs[job_id]
        if not self._jobs:
            self._no_jobs.set()

    # Stages

    async def _compute(
        self, job_id: JobId, sequence: Sequence, target: HandoffTarget | None, progress: Progress, load: PrefixLoad
    ) -> AsyncGenerator[PrefillStarted | PrefillFinished, None]:
        started = self._clock()
        finishing = asyncio.create_task(self._finish(sequence, target, progress, load, started))
        finishing.add_done_callback(lambda _: load.stop())
        try:
            meeting = await load.wait_head_start()
            self._engine.post(partial(_start, job_id=job_id, meeting=meeting, asked_at=self._clock()))
            await load.ended()
            cached = self._cached(progress, load)
            self._metrics.started(cached, sequence.block_tokens)
            yield PrefillStarted(cached)
            yield await finishing
        finally:
            finishing.cancel()
            await asyncio.gather(finishing, return_exceptions=True)

    async def _finish(
        self, sequence: Sequence, target: HandoffTarget | None, progress: Progress, load: PrefixLoad, started: float
    ) -> PrefillFinished:
        try:
            report = await self._hand_off(sequence, target, progress) if target else NO_HANDOFF
            token = await progress.finished()
        finally:
            if progress.first_token is not None:  # also when the handoff failed: the blocks are here for the next
                num_cached = self._cached(progress, load).total
                self._metrics.computed(sequence.num_tokens - num_cached, progress.finished_at - started)
                self._offer(sequence.blocks_to_keep(range(len(sequence.block_hashes))))
        compute_s = progress.finished_at - started
        return PrefillFinished(token, self._cached(progress, load), compute_s, report.handoff_s, report.num_bytes)

    def _cached(self, progress: Progress, load: PrefixLoad) -> CachedTokens:
        """Final once the load has ended, or the prompt is computed."""
        return count_cached(progress.num_cached_blocks, load.tiers, self._model.layout.block_tokens)

    async def _hand_off(self, sequence: Sequence, target: HandoffTarget, progress: Progress) -> HandoffReport:
        async with self._links.use(target.address) as link:
            call = raw.stream_stream(link.channel, raw.KV_TRANSFER, "Receive")()
            sender = HandoffSender(
                *(call, link.turns, target, self._model, sequence, progress, self._kv.view_slabs),
                stall_s=self._stall_s,
                clock=self._clock,
            )
            report = await sender.send()
        self._metrics.handed_off(report)
        return report

    def _check_open(self) -> None:
        if self._draining:
            raise UnavailableError("this prefill node is draining; use another one")
        if self._engine.stuck(self._clock()):
            raise UnavailableError("this prefill node's engine is stuck; use another one")

    def _check(self, request: NodeRequest, target: HandoffTarget | None) -> None:
        """Raises InvalidRequestError or UnavailableError; what a coordinator of this release never causes."""
        self._check_open()
        model, num_tokens = self._model, len(request.token_ids)
        if num_tokens > model.max_model_len:
            raise PromptTooLongError(f"{num_tokens} tokens are more than the model's {model.max_model_len}")
        for token_id in request.token_ids:
            check_token_id("token_ids", token_id, model.vocab_size)
        request.sampling.validate(model.vocab_size)
        if request.sampling.seed is None and not request.sampling.greedy:
            raise InvalidRequestError("seed is not set; nodes take it from the coordinator")
        most = (num_tokens - 1) // model.layout.block_tokens
        if target is not None and not 0 <= target.first_block <= most:
            raise InvalidRequestError(f"first_block is {target.first_block}; allowed is [0, {most}]")


def _start(core: PrefillCore, job_id: JobId, meeting: Meeting, asked_at: float) -> None:
    core.came(asked_at)
    core.start(job_id, meeting)
