"""What a coordinator does for one request, and for one status, when there are 1,000 nodes: its own code, in process.

A placement is the choice alone: what is cached where, and what each pair of nodes would cost. From `accept` to the
moment when a decode node is asked for a reservation there is more: checks, hashes of the prompt's blocks, the queue.
Nodes answer at once, from memory. Times are of the CPU: all of it happens in one thread, which others may keep waiting.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import uvloop
from prometheus_client import CollectorRegistry

from bench.coordinator.fake_nodes import MODEL
from bench.coordinator.plan import DECISIONS, Setting
from bench.coordinator.stamps import FIRST_ID, NUM_IDS
from bench.engine.launch import WorkerFailedError
from bench.engine.table import percentile
from bench.handoff.samples import Bar, Samples
from coordinator.answer import Answer
from coordinator.config import CoordinatorConfig
from coordinator.identity import ANYONE
from coordinator.lifetime import Lifetime
from coordinator.main import Coordinator
from coordinator.placement import Limits, Placer
from coordinator.request import AcceptedRequest, RequestState
from coordinator.served_models import ServedModel
from coordinator.tenants import Salts, Tenant
from kvrelay.cluster import NodeInfo, NodeRates, NodeStatus
from kvrelay.inference import GenerateRequest, RequestFinished, TokenPrompt
from kvrelay.messages import (
    DecodeFinished,
    PrefillFinished,
    PrefillStarted,
    ReservationGranted,
)
from kvrelay.rpc.answers import AnswerEvents
from kvrelay.sampling import GeneratedToken, SamplingParams
from kvrelay.types import BlockCounts, CachedTokens, FinishReason, InstanceId, RequestId, ReservationId, Role

SIZES = (2, 1_000)  # nodes, half of each kind
PREFIX_TOKENS = 1_024
PROMPT_TOKENS = 1_100
ANSWER_TOKENS = 2
LOCAL_TAIL_TOKENS = 32
NO_REQUEST = GenerateRequest(None)  # of the default tenant, without a salt of its own
SILENCE_S = 3_600.0  # of a node that is not measured just now
NUM_BLOCKS = 16_384
PLACE = "a placement"
ACCEPT = "from acceptance to Reserve"
STATUS = "one node's status"
RATES = NodeRates(
    prefill_tokens_per_s=5_000, handoff_bytes_per_s=1e9, store_bytes_per_s=1e9, step_s=0.01, step_row_s=0.0005
)


def measure(setting: Setting, samples: Samples, seed: int) -> None:
    for num_nodes in SIZES:
        times_s = uvloop.run(_measure(setting, num_nodes, seed))
        for line, values in times_s.items():
            for percent in (50, 99):
                column = f"p{percent}, ms"
                samples.add(DECISIONS, line_of(line, num_nodes), column, 1e3 * percentile(values, percent))


def line_of(what: str, num_nodes: int) -> str:
    return f"{what}, {num_nodes:,} nodes"


def bars() -> list[Bar]:
    line = line_of(PLACE, SIZES[-1])
    return [Bar("a placement among 1,000 nodes at p99, ms", (DECISIONS, line, "p99, ms"), most=1.0)]


async def _measure(setting: Setting, num_nodes: int, seed: int) -> dict[str, list[float]]:
    app = Coordinator(
        CoordinatorConfig(model=setting.model, member_timeout_s=SILENCE_S), InstanceId("bench"), CollectorRegistry()
    )
    (model,) = app._models
    cluster, nodes, draw = model.cluster, InstantNodes(), random.Random(seed)
    cluster.nodes = nodes  # type: ignore[assignment]
    members = [cluster.join(_info(number)) for number in range(num_nodes)]
    for member in members:
        cluster.update(member, _status(draw))
    num_warm_up = setting.effort.num_decisions // 2  # requests that leave their prompts in caches
    prefixes = [_token_ids(draw, PREFIX_TOKENS) for _ in range(num_warm_up)]
    times_s: dict[str, list[float]] = {PLACE: [], ACCEPT: [], STATUS: []}
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    for number in range(num_warm_up + setting.effort.num_decisions):
        prompt = TokenPrompt((*draw.choice(prefixes), *_token_ids(draw, PROMPT_TOKENS - PREFIX_TOKENS)))
        began = time.thread_time()
        running = await app.door.accept(GenerateRequest(prompt, sampling), ANYONE)
        events = [event async for event in running.events()]
        if not isinstance(events[-1], RequestFinished):
            raise WorkerFailedError(f"a request did not finish: {events[-1]}")
        times_s[ACCEPT].append(nodes.asked_at - began)
        placer = _placer(prompt.token_ids, sampling, model)
        began = time.thread_time()
        placer.forecast()
        times_s[PLACE].append(time.thread_time() - began)
        status = _status(draw)
        began = time.thread_time()
        cluster.update(members[number % num_nodes], status)
        times_s[STATUS].append(time.thread_time() - began)
    await app.close()
    return {line: values[num_warm_up:] for line, values in times_s.items()}


def _placer(prompt_ids: tuple[int, ...], sampling: SamplingParams, model: ServedModel) -> Placer:
    """Of a request whose blocks have their hashes already."""
    accepted = AcceptedRequest(
        *(RequestId("r"), RequestId("r"), prompt_ids, sampling, MODEL), scope=Salts(b"").scope(Tenant(), NO_REQUEST)
    )
    state = RequestState(accepted, Answer(model.text.tokenizer, sampling, ()), 0.0)
    state.hashes()
    limits = Limits(60.0, 3, LOCAL_TAIL_TOKENS, 5.0, 600.0)
    return Placer(state, model.cluster, model.admission, limits, Lifetime(lambda *edge: None))


class InstantNodes:
    """In the place of the coordinator's connections: nodes that have computed everything before they are asked."""

    asked_at = 0.0

    async def reserve(self, address: str, *request: object, **more: object) -> ReservationGranted:
        self.asked_at = time.thread_time()
        return ReservationGranted(ReservationId("r"), InstanceId(address), 0, 10.0)

    def prefill(self, address: str) -> _PrefillClient:
        return _PrefillClient()

    def decode(self, address: str) -> _DecodeClient:
        return _DecodeClient()

    def release(self, address: str, reservation_id: ReservationId) -> None:
        pass

    def forget(self, address: str) -> None:
        pass

    async def close(self) -> None:
        pass


class _PrefillClient:
    def prefill(self, *request: object, timeout_s: float) -> AbstractAsyncContextManager[AsyncIterator[object]]:
        finished = PrefillFinished(GeneratedToken(FIRST_ID), CachedTokens(), 0.0, 0.0, 0)
        return _replies(PrefillStarted(CachedTokens()), finished)


class _DecodeClient:
    def decode(self, *request: object, timeout_s: float) -> AnswerEvents:
        events = AnswerEvents()
        events.take((GeneratedToken(FIRST_ID),) * ANSWER_TOKENS)
        events.end(DecodeFinished(FinishReason.LENGTH))
        return events


@asynccontextmanager
async def _replies(*events: object) -> AsyncIterator[AsyncIterator[object]]:
    async def each() -> AsyncIterator[object]:
        for event in events:
            yield event

    yield each()


def _info(number: int) -> NodeInfo:
    role = Role.DECODE_NODE if number % 2 else Role.PREFILL_NODE
    return NodeInfo(role, InstanceId(f"{role.value}-{number:04}"), f"10.0.{number // 250}.{number % 250}:9000", MODEL)


def _status(draw: random.Random) -> NodeStatus:
    """Of a node that has something to do, and room for more."""
    held = draw.randrange(NUM_BLOCKS // 2)
    return NodeStatus(
        ready=True,
        blocks=BlockCounts(NUM_BLOCKS, free=NUM_BLOCKS - held, held=held),
        num_running=draw.randrange(32),
        num_slots_free=draw.randrange(4, 12),
        rates=RATES,
        num_waiting_tokens=draw.randrange(4_096),
    )


def _token_ids(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(FIRST_ID, FIRST_ID + NUM_IDS) for _ in range(count))
