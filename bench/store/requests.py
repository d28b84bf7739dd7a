"""What a store does to requests that gain nothing from it: while blocks are put, and when it has a fault.

The line to compare with is the same cluster without a store, measured in the same round. Faults: `stopped`, its process
is gone; `stuck`, it is stopped in its tracks and its connections stay; `slow`, a link of 1 MB/s; `lying`, a bit of
every block is flipped on the way. Each is asked for prompts whose prefix the store has and the nodes' pools do not, by
a prefill node that has loaded from the store until then.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import statistics
from collections.abc import Iterator
from contextlib import contextmanager

from bench.handoff.pace import MB
from bench.handoff.samples import Bar, Samples
from bench.handoff.shapes import info_of
from bench.store.asking import (
    BLOCK_TOKENS,
    TAIL_TOKENS,
    Asker,
    Prompt,
    Prompts,
    make_proxied_cluster,
    running,
)
from bench.store.plan import REQUESTS, Setting
from bench.store.processes import restart
from tests.support.fault_proxy import FaultProxy
from tests.support.link_faults import Direction

OFFLOAD = f"{REQUESTS}, puts"
FAULTS = f"{REQUESTS}, faults"
NO_STORE = "no store"
HEALTHY = "healthy"
STOPPED, STUCK, SLOW, LYING = "stopped", "stuck", "slow, 1 MB/s", "lying"
FAULT_LINES = (LYING, SLOW, STUCK, STOPPED)
WITH_STORE = "a store that is given every block"
FIRST = "the first request"
LATER = "the next one"
TTFT_MS = "first token, ms"
PUT_SHARE = "of their blocks, put in the end, %"
SPARE_BLOCKS = 4
MANY_FRAMES = 10_000  # more than pass
WARM_UP_TOKENS = 128
NUM_WAKING = 6
NUM_PLAIN = 5  # prompts that are asked without a store


def measure(setting: Setting, samples: Samples, round_number: int) -> None:
    """One round. Raises WorkerFailedError."""
    draw = Prompts(1_000 + round_number, info_of(str(setting.model)).vocab_size)
    asyncio.run(_without_store(setting, samples, draw))
    asyncio.run(_with_store(setting, samples, draw))


async def _without_store(setting: Setting, samples: Samples, draw: Prompts) -> None:
    num_tokens = setting.effort.request_tokens
    # Through relays as the one with a store is: they take a third of the time themselves.
    cluster = make_proxied_cluster(setting.model, setting.directory, _pool_blocks(num_tokens), with_store=False)
    try:
        async with running(cluster) as asker:
            await _warm_up(asker, draw)
            times = [(await asker.compute(prompt)).ttft_s for prompt in draw.of(num_tokens, NUM_PLAIN)]
    finally:
        cluster.kill()
        shutil.rmtree(cluster.directory)
    median = statistics.median(times)
    samples.add(OFFLOAD, NO_STORE, TTFT_MS, 1e3 * median)
    for column in (FIRST, LATER):
        samples.add(FAULTS, NO_STORE, column, median)


async def _with_store(setting: Setting, samples: Samples, draw: Prompts) -> None:
    num_tokens = setting.effort.request_tokens
    cluster = make_proxied_cluster(setting.model, setting.directory, _pool_blocks(num_tokens))
    waking = draw.of(WARM_UP_TOKENS, NUM_WAKING)
    prompts = draw.of(num_tokens, 2 * (1 + len(FAULT_LINES)))
    try:
        async with running(cluster) as asker:
            await _warm_up(asker, draw)
            await asker.note_settled()
            # Each is computed while the blocks of the one before it are put.
            busy = draw.of(num_tokens, NUM_PLAIN)
            times = [(await asker.compute(prompt)).ttft_s for prompt in busy]
            num_put = await asker.note_settled()
            samples.add(OFFLOAD, WITH_STORE, TTFT_MS, 1e3 * statistics.median(times[1:]))
            num_blocks = sum(len(prompt) // BLOCK_TOKENS for prompt in busy)
            samples.add(OFFLOAD, WITH_STORE, PUT_SHARE, 100 * num_put / num_blocks)
            for prompt in [*waking, *prompts]:
                await asker.compute(prompt)
                await asker.note_stored([prompt])  # before the next one drives it out of the node's pool
            await _Faults(asker, cluster.proxies["kvstore-0"], samples).measure(prompts, waking)
    finally:
        cluster.kill()
        shutil.rmtree(cluster.directory)


class _Faults:
    def __init__(self, asker: Asker, proxy: FaultProxy, samples: Samples) -> None:
        self._asker = asker
        self._proxy = proxy
        self._samples = samples

    async def measure(self, prompts: list[Prompt], waking: list[Prompt]) -> None:
        pairs = iter(zip(prompts[::2], prompts[1::2], strict=True))
        await self._ask(HEALTHY, next(pairs))
        for line, pair in zip(FAULT_LINES, pairs, strict=True):
            # A new node, that has nothing against the store yet, and has seen what it gives.
            await asyncio.to_thread(self._replace_prefill_node)
            await self._asker.reach_store(list(waking))
            with self._fault(line):
                await self._ask(line, pair)

    def _replace_prefill_node(self) -> None:
        node = self._asker.cluster.prefill[0]
        node.stop()
        restart(node)

    async def _ask(self, line: str, pair: tuple[Prompt, Prompt]) -> None:
        for column, prompt in zip((FIRST, LATER), pair, strict=True):
            seen = await self._asker.ask(prompt)
            assert seen.cached.device == 0, f"{line}: {seen.cached}"
            self._samples.add(FAULTS, line, column, seen.ttft_s)
            self._samples.add(FAULTS, line, f"{column}: tokens loaded", seen.cached.total)

    @contextmanager
    def _fault(self, line: str) -> Iterator[None]:
        store = self._asker.store
        if line == STOPPED:
            store.kill()
            yield
            restart(store)
        elif line == STUCK:
            store.signal(signal.SIGSTOP)
            yield
            store.signal(signal.SIGCONT)
        else:
            if line == SLOW:
                self._proxy.throttle(MB)
            else:
                self._proxy.corrupt(direction=Direction.TO_CLIENT, num_frames=MANY_FRAMES)
            yield
            self._proxy.heal()


async def _warm_up(asker: Asker, draw: Prompts) -> None:
    for prompt in draw.of(WARM_UP_TOKENS, 2):
        await asker.compute(prompt)


def _pool_blocks(num_tokens: int) -> int:
    return (num_tokens + TAIL_TOKENS) // BLOCK_TOKENS + SPARE_BLOCKS


def bars() -> list[Bar]:
    offload = Bar(
        "first token while blocks are put, over no store", (OFFLOAD, WITH_STORE, TTFT_MS), (OFFLOAD, NO_STORE, TTFT_MS),
        most=1.05,
    )  # fmt: skip
    faults = [
        Bar(f"{column}, store {line}, over no store", (FAULTS, line, column), (FAULTS, NO_STORE, column), most=1.2)
        for line in FAULT_LINES
        for column in (FIRST, LATER)
    ]
    return [offload, *faults]
