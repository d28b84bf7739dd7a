"""Takes requests in: checks them, starts their flows, knows which run, ends them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from coordinator.answer import Answer
from coordinator.choices import Choices
from coordinator.config import CoordinatorConfig
from coordinator.event_log import EventLog
from coordinator.explain import EndedRequests
from coordinator.fit import Capacity, check_capacity, settle_max_tokens
from coordinator.flow import Flow
from coordinator.identity import Identity
from coordinator.kept import KeptAnswers, Reader, Timer
from coordinator.lifetime import Edge, Lifetime, Stage
from coordinator.metrics import CoordinatorMetrics
from coordinator.open_answers import OpenAnswers
from coordinator.placement import Limits
from coordinator.request import AcceptedRequest, RequestState
from coordinator.response_cache import CachedAnswer, ResponseCache
from coordinator.running import RunningRequest
from coordinator.served_models import ServedModel, ServedModels
from coordinator.tenant_policy import TenantPolicies
from coordinator.tenants import Salts, Tenant
from coordinator.terms import Terms
from kvrelay.cluster import ModelInfo
from kvrelay.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    KVRelayError,
    NotFoundError,
    UnavailableError,
)
from kvrelay.explanation import Explanation
from kvrelay.inference import GenerateRequest
from kvrelay.rpc.convert_types import check_request_id
from kvrelay.sampling import SamplingParams, fork_seed
from kvrelay.types import InstanceId, RequestId, Role

Answering = RunningRequest | Reader | CachedAnswer  # what a client's call reads, and tells when it ends

logger = logging.getLogger(__name__)

MAX_NODE_ID_PREFIX = 96  # of the client's id inside the nodes' id, which has at most 128 characters


class FrontDoor:
    """Belongs to the event loop."""

    def __init__(
        self,
        config: CoordinatorConfig,
        models: ServedModels,
        metrics: CoordinatorMetrics,
        instance_id: InstanceId,
        salts: Salts,
        policies: TenantPolicies,
        terms: Terms,
    ) -> None:
        self.models = models
        self._config = config
        self._metrics = metrics
        self._salts = salts
        self._policies = policies
        self._terms = terms
        self._limits = Limits(
            max_queue_wait_s=config.max_queue_wait_s,
            max_retries=config.max_retries,
            local_tail_tokens=config.local_tail_tokens,
            no_node_wait_s=config.no_node_wait_s,
            request_timeout_s=config.request_timeout_s,
        )
        self._node_ids = (f"#{instance_id[:16]}.{number:x}" for number in itertools.count(1))
        self._running: dict[RequestId, RunningRequest] = {}
        self._kept = KeptAnswers(config.max_kept_bytes, _call_later, metrics.attached)
        self._ended_lately = EndedRequests()
        metrics.watch_kept(lambda: self._kept.num_bytes)
        self._responses = ResponseCache(config.response_cache_bytes, config.response_cache_ttl_s, time.monotonic)
        metrics.watch_responses(lambda: self._responses.num_bytes)
        self._open_answers = OpenAnswers(policies)
        self._draining = False

    @property
    def num_waiting(self) -> int:
        """Answers that wait for room."""
        return self.models.num_waiting

    @property
    def num_open(self) -> int:
        """Answers that wait for room or are computed."""
        return sum(running.num_open for running in self._running.values())

    def why_not_ready(self) -> str:
        """Empty when a request sent now, for some model, would be served."""
        return "draining" if self._draining else self.models.why_not_ready

    async def accept(self, request: GenerateRequest, caller: Identity) -> Answering:
        """Checks everything that can be known now, takes a place in the queue for each answer and starts the request.
        `caller` is who sent it. One that is kept and sent again goes on with its first sending, and takes no place.

        Raises KVRelayError; then nothing of the request is left.
        """
        try:
            return await self._accept(request, caller)
        except KVRelayError as error:
            self._metrics.failed(error.code)
            raise

    async def _accept(self, request: GenerateRequest, caller: Identity) -> Answering:
        tenant = caller.tenant
        request_id = _settle_request_id(request.request_id)  # before a promise is remembered by it
        request.check_keep()
        if (reader := self._kept.attach(request, tenant.label)) is not None:
            return reader
        served = self.models.find(request.model)
        self._check_n(request, served, tenant.label)
        request.check_priority()
        scope = self._salts.scope(tenant, request)
        self._terms.check(request, scope.tenant)
        self._check_open(request, served, caller)
        model = served.info
        response_key = self._responses.key(replace(request, model=served.name), tenant, model)
        if response_key is not None and (cached := self._cached(response_key, request_id, scope.tenant)) is not None:
            return cached
        request.sampling.validate(model.vocab_size)
        if request.sampling.structured is not None:
            await served.text.check_structured(request.sampling.structured)
        prompt_ids = await served.text.prompt_ids(request.prompt, model.vocab_size, model.max_model_len)
        # A drain may have begun meanwhile, and counts on the requests it found.
        self._check_open(request, served, caller)
        sampling = self._settle_sampling(request.sampling, len(prompt_ids), served, model)
        if (reader := self._kept.attach(request, tenant.label)) is not None:  # it came twice at once
            return reader
        if request_id in self._running:
            raise DuplicateRequestError(f"a request with the id {request_id!r} is running; choose another id")
        accepted = AcceptedRequest(request_id, request_id, prompt_ids, sampling, model, scope)
        accepted = self._terms.settle(accepted, request)
        return self._start(served, self._choices_of(accepted, request.n), request, caller, response_key)

    def _cached(self, key: bytes, request_id: RequestId, tenant: str) -> CachedAnswer | None:
        """Costs the tenant what the original did: it is told the same usage."""
        log = None if request_id in self._running else self._responses.find(key)
        self._metrics.looked_for_response(found=log is not None)
        if log is None:
            return None
        cached = CachedAnswer(request_id, log, time.monotonic)
        usage = cached.finished.usage
        self._terms.spend(tenant, usage.prompt_tokens + usage.completion_tokens)
        return cached

    def cancel(self, request_id: str, tenant: Tenant) -> None:
        """Ends a request of the tenant's, or forgets its answer where it is kept. Raises NotFoundError without one."""
        running = self._running.get(RequestId(request_id))
        if running is not None and running.accepted.tenant == tenant.label:
            running.cancel("the request was cancelled")
        elif not self._kept.forget(RequestId(request_id), tenant.label):
            raise NotFoundError(f"no request with the id {request_id[:128]!r} is running")

    def explain(self, request_id: str, tenant: Tenant) -> Explanation:
        """Raises NotFoundError when the tenant has none under the id that runs or ended lately."""
        running = self._running.get(RequestId(request_id))
        if running is not None and running.accepted.tenant == tenant.label:
            return running.explain()
        explanation = self._ended_lately.find(RequestId(request_id), tenant.label, self._now())
        if explanation is None:
            raise NotFoundError(f"no request with the id {request_id[:128]!r} runs or ended lately")
        return explanation

    async def drain(self, deadline_s: float) -> None:
        """Takes nothing new; lets what runs finish for `deadline_s` or until this is cancelled, then ends it."""
        self._draining = True
        try:
            if self._running:
                await asyncio.wait([running.task for running in self._running.values()], timeout=deadline_s)
        finally:
            leftover = list(self._running.values())
            for running in leftover:
                running.fail(UnavailableError("this coordinator is shutting down; send the request to another one"))
        if leftover:
            await asyncio.wait([running.task for running in leftover])

    async def close(self) -> None:
        await self.drain(0.0)
        self._kept.close()

    @staticmethod
    def _check_n(request: GenerateRequest, served: ServedModel, tenant: str) -> None:
        request.check_n()
        most = served.admission.most_places(tenant)
        if request.n > most:
            raise InvalidRequestError(
                f"n is {request.n}; allowed is at most {most} here: each answer needs a place in the queue, and this "
                "coordinator has no more"
            )

    def _check_open(self, request: GenerateRequest, served: ServedModel, caller: Identity) -> None:
        if self._draining:
            raise UnavailableError("this coordinator takes no requests now: draining", retry_after_s=1.0)
        if why := served.why_not_ready:
            raise UnavailableError(f"model {served.name!r} takes no requests now: {why}", retry_after_s=1.0)
        self._open_answers.check(caller, request.n)
        tenant = caller.tenant.label
        served.admission.check_room(tenant, self._now(), num_places=request.n, request_id=request.request_id)

    def _settle_sampling(
        self, sampling: SamplingParams, num_prompt_tokens: int, served: ServedModel, model: ModelInfo
    ) -> SamplingParams:
        max_tokens = settle_max_tokens(num_prompt_tokens, sampling.max_tokens, self._config.default_max_tokens, model)
        members = served.cluster.members
        capacity = Capacity(members.largest_pool(Role.DECODE_NODE), members.largest_pool(Role.PREFILL_NODE))
        check_capacity(num_prompt_tokens, max_tokens, model.layout, capacity)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        settled = replace(sampling, max_tokens=max_tokens, seed=seed)
        settled.validate(model.vocab_size)  # min_tokens against the settled max_tokens
        return settled

    def _choices_of(self, accepted: AcceptedRequest, n: int) -> list[AcceptedRequest]:
        """One for each answer; nodes know each by an id of its own."""
        seed = accepted.sampling.seed
        assert seed is not None
        choices = []
        for index in range(n):
            node_id = RequestId(accepted.request_id[:MAX_NODE_ID_PREFIX] + next(self._node_ids))
            drawing = replace(accepted.sampling, seed=fork_seed(seed, index))
            choices.append(replace(accepted, node_request_id=node_id, sampling=drawing))
        return choices

    def _start(
        self,
        served: ServedModel,
        accepted: list[AcceptedRequest],
        request: GenerateRequest,
        caller: Identity,
        response_key: bytes | None,
    ) -> Answering:
        sampling, tenant = accepted[0].sampling, accepted[0].tenant
        kept = self._kept.make_log(request, sampling) if request.keep_s else None
        log = EventLog() if response_key is not None else kept
        running = RunningRequest(accepted[0], self._metrics, len(accepted), log)
        flows = [self._flow(served, running, index, choice) for index, choice in enumerate(accepted)]
        self._terms.admit(flows, request.request_id, self._now())
        choices = Choices(flows, served.admission, running.choice_finished)
        choices.enter(request.request_id, self._now())
        self._running[running.accepted.request_id] = running
        self._open_answers.began(caller, request.n)
        running.start(choices, self._terms.tally(flows[0].state.accepted), self._config.request_timeout_s)
        running.task.add_done_callback(lambda _: self._ended(served, running, caller, request.n))
        if response_key is not None and log is not None:
            running.task.add_done_callback(lambda _: self._responses.add(response_key, log))
        return running if kept is None else self._kept.add(request, sampling, tenant, kept, running.cancel)

    def _flow(self, served: ServedModel, running: RunningRequest, index: int, accepted: AcceptedRequest) -> Flow:
        answer = Answer(served.text.tokenizer, accepted.sampling, accepted.model.eos_token_ids, index)
        state = RequestState(accepted, answer, time.monotonic())
        return Flow(
            state,
            served.cluster,
            served.admission,
            self._limits_of(accepted.tenant),
            Lifetime(partial(self._took, state)),
            emit=running.emit,
            on_retry=self._metrics.retried,
        )

    def _limits_of(self, tenant: str) -> Limits:
        most_s = self._limits.max_queue_wait_s
        return replace(self._limits, max_queue_wait_s=min(self._policies.of(tenant).max_wait_s or most_s, most_s))

    def _took(self, state: RequestState, edge: Edge, before: Stage | None, after: Stage, detail: str) -> None:
        self._metrics.edge(edge, before, after)
        state.steps.take(edge, before, after, detail)

    def _ended(self, served: ServedModel, running: RunningRequest, caller: Identity, n: int) -> None:
        self._open_answers.ended(caller, n)
        request_id = running.accepted.request_id
        del self._running[request_id]
        self._kept.ended(request_id)
        self._ended_lately.add(running.explain(), self._now())
        served.admission.changed()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _call_later(delay_s: float, then: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(delay_s, then)


def _settle_request_id(request_id: str) -> RequestId:
    if not request_id:
        return RequestId(secrets.token_hex(16))
    check_request_id(request_id)
    return RequestId(request_id)
