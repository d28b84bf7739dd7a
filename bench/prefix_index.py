"""The coordinator's prefix index at size: python -m bench.prefix_index

Memory, the time of each call, and how many blocks a second it takes in, on one core. Hashes are random, each message
tells of a prompt's blocks. No network and no nodes: what it measures is the processor time that the coordinator's loop
spends.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from coordinator.prefix_index import PrefixIndex
from kvrelay.cluster import CacheCleared, CacheEvents, CacheRemoved, CacheStored
from kvrelay.types import BlockHash, InstanceId

PROMPT_BLOCKS = 64
NUM_HOLDERS = 3  # nodes that have a prompt
MIB = 1024 * 1024

Prompt = list[BlockHash]


class Cluster:
    """An index, and the nodes that tell it."""

    def __init__(self, num_nodes: int, max_blocks: int) -> None:
        self.index = PrefixIndex(max_blocks)
        self.nodes = [InstanceId(f"{number:016x}") for number in range(num_nodes)]
        self._sequences = dict.fromkeys(self.nodes, 1)
        for name in self.nodes:
            self.index.joined(name, 0.0)
            self.tell(name, CacheCleared())

    def tell(self, name: InstanceId, event: CacheStored | CacheRemoved | CacheCleared) -> None:
        if self.index.apply(name, CacheEvents(self._sequences[name], (event,)), 0.0):
            raise AssertionError("the bench lost count")
        self._sequences[name] += 1


def prompt() -> Prompt:
    data = os.urandom(32 * PROMPT_BLOCKS)
    return [BlockHash(data[start : start + 32]) for start in range(0, len(data), 32)]


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def timed(call: Callable[..., object], arguments: Iterable[tuple[object, ...]]) -> list[float]:
    """Processor time of each call, in seconds."""
    seconds = []
    for one in arguments:
        started = time.thread_time()
        call(*one)
        seconds.append(time.thread_time() - started)
    return seconds


def show(what: str, seconds: Sequence[float]) -> None:
    ordered = sorted(seconds)
    p50, p99 = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
    print(f"{what:58} p50 {p50 * 1e6:7.1f} us   p99 {p99 * 1e6:7.1f} us   max {ordered[-1] * 1e6:7.1f} us")


def just_computed(prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, float]]:
    """What a match is given: a coordinator that asks has the hashes in the processor's caches, and nothing else."""
    for hashes in prompts:
        yield [BlockHash(bytes(bytearray(block_hash))) for block_hash in hashes], 0.0


def looked_up(index: PrefixIndex, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, float]]:
    """As a request's second look, a moment after the first."""
    for hashes in prompts:
        index.match(hashes, 0.0)
        yield hashes, 0.0


def fill(cluster: Cluster, num_blocks: int) -> list[Prompt]:
    """Each node's part, in prompts, of which it gives about a thousand."""
    num_prompts, sample = num_blocks // PROMPT_BLOCKS, []
    before, seconds = resident_bytes(), []
    for number in range(num_prompts):
        hashes = prompt()
        seconds += timed(cluster.tell, [(cluster.nodes[number % len(cluster.nodes)], CacheStored(hashes))])
        if random.random() < 1000 / num_prompts:
            sample.append(hashes)
    used, known = (resident_bytes() - before) / MIB, cluster.index.num_blocks
    print(f"{known:,} blocks of {len(cluster.nodes):,} nodes: {used:.0f} MiB, {used / known * 1e6:.0f} MiB a million")
    print(f"{known / sum(seconds):,.0f} blocks stored a second")
    show(f"stored, {PROMPT_BLOCKS} blocks", seconds)
    return sample


def share(cluster: Cluster, sample: Sequence[Prompt]) -> Prompt:
    """All nodes have what it gives, and some have each prompt of the sample."""
    shared, before = prompt(), resident_bytes()
    for name in cluster.nodes:
        cluster.tell(name, CacheStored(shared))
    used = (resident_bytes() - before) / MIB
    print(f"{PROMPT_BLOCKS} blocks that all {len(cluster.nodes):,} nodes share: {used:.1f} MiB more")
    for hashes in sample:
        for name in random.sample(cluster.nodes, NUM_HOLDERS - 1):
            cluster.tell(name, CacheStored(hashes))
    return shared


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--nodes", type=int, default=1_000)
    args = parser.parse_args(argv)
    random.seed(1)
    cluster = Cluster(args.nodes, 2 * args.blocks)
    index, nodes = cluster.index, cluster.nodes
    sample = fill(cluster, args.blocks)
    shared = share(cluster, sample)
    strangers, mixed = [prompt() for _ in range(1000)], [shared + hashes for hashes in sample]
    few = f"match, {PROMPT_BLOCKS} blocks that {NUM_HOLDERS} of {len(nodes):,} nodes have"
    show(few, timed(index.match, just_computed(sample)))
    show("  looked up a moment before", timed(index.match, looked_up(index, sample)))
    show("match, blocks that nobody has", timed(index.match, just_computed(strangers)))
    both = f"match, {PROMPT_BLOCKS} blocks that all have and {PROMPT_BLOCKS} that few have"
    show(both, timed(index.match, just_computed(mixed)))
    sent = timed(index.assigned, ((random.choice(nodes), hashes, 0.0) for hashes in strangers))
    show(f"assigned, {PROMPT_BLOCKS} new blocks", sent)
    removed = timed(cluster.tell, ((name, CacheRemoved(shared)) for name in nodes))
    show(f"removed, {PROMPT_BLOCKS} blocks", removed)
    show("a node is lost", timed(index.forget, ((name,) for name in nodes[: len(nodes) // 2])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
