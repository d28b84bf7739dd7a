"""Requests that are brought to a known stage of their lives in a real cluster and kept there until a fault comes."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from kvrelay.client import AsyncClient
from kvrelay.errors import KVRelayError
from kvrelay.inference import RequestFinished, TokenPrompt, TokensGenerated
from kvrelay.kv.frame import FrameKind
from kvrelay.messages import NodeRequest
from kvrelay.sampling import SamplingParams
from kvrelay.types import RequestId
from tests.support.byte_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from tests.support.cluster import RoleProcess
from tests.support.link_faults import Hold
from tests.support.proxied_cluster import ProxiedCluster
from tests.support.reference import ReferenceEngine

PROMPT_TOKENS = 120  # seven blocks and a tail
SHORT_ANSWER = 8
IN_CHUNKS = ["--chunk-tokens", "32"]  # of a prefill node: blocks leave two by two
LONG_ANSWER = 600  # takes seconds: it is not over when the fault comes
LONG_ANSWER_SEEDS = range(1, 13)  # the same ones in every run, so that a reference is computed once
LONG_ANSWERS = 4  # and more until one runs on the victim: all their prompts may be cached on the other decode node
ANSWER_TIMEOUT_S = 120.0
STAGE_TIMEOUT_S = 60.0
MAX_TRIES = 6  # requests until one goes where it is wanted; load balancing needs two

# First bytes of the replies that end a stage: field 2 (3) of the event is set. See proto/kvrelay/pb.
NODE_FINISHED = b"\x12"  # DecodeReply and PrefillEvent
REQUEST_FINISHED = b"\x1a"  # GenerateEvent


class Stage(Enum):
    BEFORE_RESERVE = "before_reserve"  # the fault is there first
    BEFORE_FIRST_FRAME = "before_first_frame"  # reserved; the KV stream's BEGIN is on its way
    MID_STREAM = "mid_stream"  # some blocks have arrived
    BEFORE_COMMIT = "before_commit"  # every block has arrived, END has not
    MID_DECODE = "mid_decode"  # the client has some tokens
    AT_END = "at_end"  # all is computed, the word that it is complete has not arrived


HELD_BEFORE = {
    Stage.BEFORE_FIRST_FRAME: (FrameKind.BEGIN, 1),
    Stage.MID_STREAM: (FrameKind.BLOCK, 5),
    Stage.BEFORE_COMMIT: (FrameKind.END, 1),
}


class Reference:
    """What an engine answers that runs alone; each answer is computed once."""

    def __init__(self, model: Path) -> None:
        self._engine = ReferenceEngine(model)
        self._answers: dict[tuple[tuple[int, ...], str], list[int]] = {}

    def answer(self, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> list[int]:
        key = prompt_ids, repr(sampling)
        if key not in self._answers:
            request = NodeRequest(RequestId("reference"), prompt_ids, len(prompt_ids), sampling)
            self._answers[key] = self._engine.answer(request)
        return self._answers[key]


class InFlight:
    """One request, and what came of it."""

    def __init__(self, stage: Stage, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> None:
        self.stage = stage
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.token_ids: list[int] = []
        self.finished: RequestFinished | None = None
        self.error: KVRelayError | None = None
        self.ended_at = 0.0  # not over yet, or given up by the test
        self.task: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return f"{self.stage.value}, {'greedy' if self.sampling.greedy else 'seeded'}"

    @property
    def is_over(self) -> bool:
        return self.task is not None and self.task.done()

    def start(self, client: AsyncClient) -> InFlight:
        self.task = asyncio.create_task(self._run(client))
        return self

    def expected(self, reference: Reference) -> list[int]:
        return reference.answer(self.prompt_ids, self.sampling)

    async def _run(self, client: AsyncClient) -> None:
        try:
            async for event in client.generate(TokenPrompt(self.prompt_ids), self.sampling, timeout_s=ANSWER_TIMEOUT_S):
                if isinstance(event, TokensGenerated):
                    self.token_ids += [token.token_id for token in event.tokens]
                elif isinstance(event, RequestFinished):
                    self.finished = event
        except KVRelayError as error:
            self.error = error
        self.ended_at = time.monotonic()


@dataclass(frozen=True)
class HeldStream:
    hold: Hold
    ends: tuple[RoleProcess, ...]


@dataclass
class Flight:
    """All requests of one run. `victim` is who the fault will hit: every stage gets a request that concerns it."""

    cluster: ProxiedCluster
    client: AsyncClient
    victim: RoleProcess
    seeds: Iterable[int]
    requests: list[InFlight] = field(default_factory=list)
    held: list[HeldStream] = field(default_factory=list)

    async def launch_all(self) -> None:
        """Every stage but BEFORE_RESERVE, for which `launch` is called once the fault is there."""
        for stage in HELD_BEFORE:
            await self.launch_held(stage)
        running = await self._launch_long_ones()
        await self._launch_to_the_end()
        assert not any(request.is_over for request in running), "the fault comes too late"

    def launch(self, stage: Stage, max_tokens: int = SHORT_ANSWER, seed: int | None = None) -> InFlight:
        """Greedy and seeded in turn, by its seed."""
        seed = next(iter(self.seeds)) if seed is None else seed
        temperature = 0.8 * (seed % 2)
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=seed)
        self.requests.append(InFlight(stage, make_prompt(PROMPT_TOKENS, seed), sampling).start(self.client))
        return self.requests[-1]

    def release(self, *, of_victim: bool) -> None:
        """Lets held streams go on: those that do not touch the victim, or all."""
        for stream in list(self.held):
            if of_victim or self.victim not in stream.ends:
                stream.hold.release()
                self.held.remove(stream)

    async def all_over(self, timeout_s: float) -> None:
        await asyncio.wait([request.task for request in self.requests if request.task], timeout=timeout_s)

    async def launch_held_one(self, stage: Stage) -> HeldStream:
        """Returns when its KV stream stands; `ends` are the prefill and the decode node."""
        kind, nth = HELD_BEFORE[stage]
        holds = {
            self.cluster.proxy(decode).hold(kind, nth, pid=prefill.pid): (prefill, decode)
            for decode in self.cluster.decode
            for prefill in self.cluster.prefill
        }
        request = self.launch(stage)
        await until(lambda: any(hold.is_reached for hold in holds), f"a stream {stage.value}", request)
        (held,) = [HeldStream(hold, ends) for hold, ends in holds.items() if hold.is_reached]
        for hold in holds.keys() - {held.hold}:
            hold.release()
        self.held.append(held)
        return held

    async def launch_held(self, stage: Stage) -> None:
        """One request of each kind, and more until one of them touches the victim."""
        is_node, touching = self.victim in (*self.cluster.prefill, *self.cluster.decode), 0
        for number in range(MAX_TRIES):
            held = await self.launch_held_one(stage)
            touching += self.victim in held.ends
            if number > 0 and (touching or not is_node):
                return
        raise AssertionError(f"no request {stage.value} went to {self.victim.log_path.stem}")

    async def _launch_long_ones(self) -> list[InFlight]:
        """All of them have tokens, and one runs on the victim if that is a decode node."""
        running: list[InFlight] = []
        for seed in LONG_ANSWER_SEEDS:
            running.append(self.launch(Stage.MID_DECODE, LONG_ANSWER, seed))
            if len(running) < LONG_ANSWERS:
                continue
            await until(lambda: all(len(request.token_ids) >= 4 for request in running), "tokens of every answer")
            if self.victim not in self.cluster.decode or await self._num_running() > 0:
                return running
        raise AssertionError(f"no long answer went to {self.victim.log_path.stem}")

    async def _num_running(self) -> float:
        return await asyncio.to_thread(self.victim.metric, "kvrelay_requests_running")

    async def _launch_to_the_end(self) -> None:
        """More at a time with every try: while one node has more to do than the other, few go there."""
        node, hold = self._hold_last_word()
        for number in range(MAX_TRIES):
            answers = [self.launch(Stage.AT_END) for _ in range(2 * (number + 1))]
            if await _caught(hold, answers):
                self.held.append(HeldStream(hold, (node,)))
                return
        raise AssertionError(f"no answer ended on {self.victim.log_path.stem}")

    def _hold_last_word(self) -> tuple[RoleProcess, Hold]:
        """Of the victim; of a decode node, if the victim says none."""
        cluster, node = self.cluster, self.victim
        if node is cluster.store:
            node = cluster.decode[0]
        pid, first_byte = cluster.coordinator.pid, NODE_FINISHED
        if node is cluster.coordinator:
            pid, first_byte = os.getpid(), REQUEST_FINISHED
        return node, cluster.proxy(node).hold_reply(lambda head: head.startswith(first_byte), pid=pid)


async def _caught(hold: Hold, requests: list[InFlight]) -> bool:
    """Whether one of the requests came to the hold; they may end elsewhere instead."""
    await until(lambda: hold.is_reached or all(request.is_over for request in requests), "the end of an answer")
    return hold.is_reached


@asynccontextmanager
async def flight(cluster: ProxiedCluster, victim: RoleProcess, seed: int) -> AsyncIterator[Flight]:
    """Ends with every link healed and every request over."""
    async with AsyncClient(cluster.address) as client:
        under_way = Flight(cluster, client, victim, itertools.count(seed))
        try:
            yield under_way
        finally:
            cluster.heal()
            tasks = [request.task for request in under_way.requests if request.task]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def make_prompt(num_tokens: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(len(SPECIAL_TOKENS), VOCAB_SIZE) for _ in range(num_tokens))


async def until(is_so: Callable[[], bool], what: str, request: InFlight | None = None) -> None:
    """Polls, since what is awaited happens in other processes and threads."""
    deadline = time.monotonic() + STAGE_TIMEOUT_S
    while not is_so():
        if request is not None and request.is_over:
            raise AssertionError(f"{request} was over before {what}: {request.error or request.finished}")
        if time.monotonic() > deadline:
            raise AssertionError(f"no {what} within {STAGE_TIMEOUT_S:g} s")
        await asyncio.sleep(0.003)
