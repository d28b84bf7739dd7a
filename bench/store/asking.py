"""A cluster of real processes around one store, and what a client of it sees."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import clusters
from kvrelay.client import AsyncClient
from kvrelay.errors import UnavailableError
from kvrelay.inference import RequestFinished, TokenPrompt, TokensGenerated
from kvrelay.sampling import SamplingParams
from kvrelay.types import CachedTokens
from tests.support.cluster import Cluster, RoleProcess
from tests.support.proxied_cluster import ProxiedCluster

BLOCK_TOKENS = 16
TAIL_TOKENS = 16  # of a prompt, behind its prefix: they are computed in any case
ANSWER_TOKENS = 2  # one alone would need no decode node
ASK_TIMEOUT_S = 60.0
STORED_S = 30.0  # until what was computed is in the store, at most
REACHED_S = 30.0  # until nodes ask a store again that is back, at most
POLL_S = 0.01
SETTLED_S = 0.5
TRIAL_S = 0.1  # between two such requests
# Every prompt goes through a prefill node, however short: only there is the store asked.
COORDINATOR_ARGS = ("--local-tail-tokens", "0")

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one answer."""

    ttft_s: float
    cached: CachedTokens


@asynccontextmanager
async def running(cluster: Cluster) -> AsyncIterator[Asker]:
    """Starts it, and ends it with the block. Raises WorkerFailedError for what a process or an answer failed of."""
    async with clusters.running(cluster), AsyncClient(cluster.address) as client:
        yield Asker(cluster, client)


def make_cluster(model: Path, directory: Path, num_blocks: int, *, with_store: bool) -> Cluster:
    """One node of each role. `num_blocks` of its pool are so few that one long prompt drives out another."""
    return _make(Cluster, model, directory, num_blocks, with_store)


def make_proxied_cluster(model: Path, directory: Path, num_blocks: int, *, with_store: bool = True) -> ProxiedCluster:
    """The same, with every link through a relay in this process, which takes its share of the cores."""
    cluster = _make(ProxiedCluster, model, directory, num_blocks, with_store)
    assert isinstance(cluster, ProxiedCluster)
    return cluster


def _make(kind: type[Cluster], model: Path, directory: Path, num_blocks: int, with_store: bool) -> Cluster:
    return kind(
        *(model, Path(tempfile.mkdtemp(prefix="cluster-", dir=directory))),
        dtype="bfloat16",
        num_blocks=num_blocks,
        with_store=with_store,
        coordinator_args=list(COORDINATOR_ARGS),
    )


class Prompts:
    """Random ones, none like another."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._draw = random.Random(seed)
        self._vocab_size = vocab_size

    def of(self, prefix_tokens: int, count: int = 1) -> list[Prompt]:
        num_tokens = prefix_tokens + TAIL_TOKENS
        return [tuple(self._draw.choices(range(3, self._vocab_size), k=num_tokens)) for _ in range(count)]


class Asker:
    """Asks one request at a time."""

    def __init__(self, cluster: Cluster, client: AsyncClient) -> None:
        self.cluster = cluster
        self._client = client
        self._num_stored = 0

    @property
    def store(self) -> RoleProcess:
        assert self.cluster.store is not None
        return self.cluster.store

    async def ask(self, prompt: Prompt) -> Seen:
        """Raises KVRelayError."""
        sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        ttft_s, cached = 0.0, None
        started = time.perf_counter()
        async with aclosing(self._client.generate(TokenPrompt(prompt), sampling, timeout_s=ASK_TIMEOUT_S)) as events:
            async for event in events:
                if isinstance(event, TokensGenerated):
                    ttft_s = ttft_s or time.perf_counter() - started
                elif isinstance(event, RequestFinished):
                    cached = event.usage.cached
        assert cached is not None
        return Seen(ttft_s, cached)

    async def compute(self, prompt: Prompt) -> Seen:
        """Asks one that nobody has seen. Raises AssertionError if something of it was cached."""
        seen = await self.ask(prompt)
        assert seen.cached.total == 0, f"{seen.cached} of a new prompt"
        return seen

    async def note_stored(self, prompts: Sequence[Prompt]) -> None:
        """Returns when the store has all full blocks of these too, on disk. Raises TimeoutError."""
        self._num_stored += sum(len(prompt) // BLOCK_TOKENS for prompt in prompts)
        async with asyncio.timeout(STORED_S):
            while await asyncio.to_thread(self._blocks_on_disk) < self._num_stored:
                await asyncio.sleep(POLL_S)

    async def note_settled(self) -> int:
        """Returns when nothing more comes onto the store's disk; how many blocks came since what was noted last."""
        num_before, num_noted = -1, self._num_stored
        async with asyncio.timeout(STORED_S):
            while num_before < self._num_stored:
                num_before = self._num_stored
                await asyncio.sleep(SETTLED_S)
                self._num_stored = int(await asyncio.to_thread(self._blocks_on_disk))
        return self._num_stored - num_noted

    async def reach_store(self, prompts: list[Prompt]) -> None:
        """Asks these, of which the store has a prefix, until one gets it; takes away those that it asked.

        Raises TimeoutError, or AssertionError when none is left.
        """
        async with asyncio.timeout(REACHED_S):
            while prompts:
                try:
                    seen = await self.ask(prompts[-1])
                except UnavailableError:  # the coordinator has not heard yet of a node that is back
                    await asyncio.sleep(TRIAL_S)
                    continue
                prompts.pop()
                if seen.cached.memory + seen.cached.disk:
                    return
        raise AssertionError("the store is back, and nothing was loaded from it")

    def _blocks_on_disk(self) -> float:
        return self.store.metric("kvrelay_store_blocks", tier="disk")
