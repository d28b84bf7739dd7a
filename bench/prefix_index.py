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
from collections.abc import Callable, Sequence
from pathlib import Path

from coordinator.prefix_index import PrefixIndex
from kvrelay.cluster import CacheCleared, CacheEvents, CacheRemoved, CacheStored
from kvrelay.types import BlockHash, InstanceId

PROMPT_BLOCKS = 64
NUM_HOLDERS = 3  # nodes that have a prompt
MIB = 1024 * 1024


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


def prompt(num_blocks: int = PROMPT_BLOCKS) -> list[BlockHash]:
    data = os.urandom(32 * num_blocks)
    return [BlockHash(data[start : start + 32]) for start in range(0, len(data), 32)]


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def timed(calls: Sequence[Callable[[], object]]) -> list[float]:
    seconds = []
    for call in calls:
        started = time.thread_time()
        call()
        seconds.append(time.thread_time() - started)
    return sorted(seconds)


def match_times(index: PrefixIndex, prompts: Sequence[Sequence[BlockHash]]) -> list[float]:
    """The hashes are copied before: a coordinator that asks has just computed them."""
    seconds = []
    for hashes in prompts:
        computed = [BlockHash(bytes(bytearray(block_hash))) for block_hash in hashes]
        seconds += timed([lambda computed=computed: index.match(computed, 0.0)])  # type: ignore[misc]
    return sorted(seconds)


def again_times(index: PrefixIndex, prompts: Sequence[Sequence[BlockHash]]) -> list[float]:
    """Of a request's second look: what it needs of the index is in the processor's caches."""
    seconds = []
    for hashes in prompts:
        index.match(hashes, 0.0)
        seconds += timed([lambda hashes=hashes: index.match(hashes, 0.0)])  # type: ignore[misc]
    return sorted(seconds)


def show(what: str, seconds: Sequence[float]) -> None:
    p50, p99 = (seconds[int(share * (len(seconds) - 1))] for share in (0.5, 0.99))
    print(f"{what:62} p50 {p50 * 1e6:8.1f} us   p99 {p99 * 1e6:8.1f} us   max {seconds[-1] * 1e6:9.1f} us")


def fill(cluster: Cluster, num_blocks: int) -> list[list[BlockHash]]:
    """Each node's part, in prompts; gives some of them."""
    prompts, sample = num_blocks // PROMPT_BLOCKS, []
    seconds = []
    for number in range(prompts):
        hashes = prompt()
        name = cluster.nodes[number % len(cluster.nodes)]
        event = CacheStored(hashes)
        seconds += timed([lambda name=name, event=event: cluster.tell(name, event)])  # type: ignore[misc]
        if random.random() < 1000 / prompts:
            sample.append(hashes)
    print(f"{prompts * PROMPT_BLOCKS / sum(seconds):,.0f} blocks stored a second")
    show(f"stored, {PROMPT_BLOCKS} blocks", sorted(seconds))
    return sample


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--nodes", type=int, default=1_000)
    args = parser.parse_args(argv)
    random.seed(1)
    cluster = Cluster(args.nodes, 2 * args.blocks)
    index, nodes = cluster.index, cluster.nodes
    before = resident_bytes()
    sample = fill(cluster, args.blocks)
    used = resident_bytes() - before
    million = used / MIB / (index.num_blocks / 1e6)
    print(f"{index.num_blocks:,} blocks of {len(nodes):,} nodes: {used / MIB:.0f} MiB, {million:.0f} MiB a million")

    shared = prompt()
    before = resident_bytes()
    for name in nodes:
        cluster.tell(name, CacheStored(shared))
    print(
        f"{PROMPT_BLOCKS} blocks that all {len(nodes):,} nodes share: {(resident_bytes() - before) / MIB:.1f} MiB more"
    )
    for hashes in sample:
        for name in random.sample(nodes, NUM_HOLDERS - 1):
            cluster.tell(name, CacheStored(hashes))
    few = match_times(index, sample)
    show(f"match, {PROMPT_BLOCKS} blocks that {NUM_HOLDERS} of {len(nodes):,} nodes have", few)
    show("the same, looked up a moment before", again_times(index, sample))
    strangers = [prompt() for _ in range(1000)]
    show("match, blocks that nobody has", match_times(index, strangers))
    mixed = [shared + hashes for hashes in sample]
    tails = timed(
        [
            lambda hashes=hashes: cluster.tell(random.choice(nodes), CacheStored(hashes))  # type: ignore[misc]
            for hashes in mixed
        ]
    )
    show(f"stored, {2 * PROMPT_BLOCKS} blocks, half of them shared by all", tails)
    common = match_times(index, mixed)
    show(f"match, {PROMPT_BLOCKS} blocks that all have and {PROMPT_BLOCKS} that few have", common)
    show(
        f"assigned, {PROMPT_BLOCKS} new blocks",
        timed([lambda hashes=hashes: index.assigned(random.choice(nodes), hashes, 0.0) for hashes in strangers]),
    )
    gone = random.sample(sample, min(len(sample), 500))
    show(
        f"removed, {PROMPT_BLOCKS} blocks",
        timed([lambda hashes=hashes: cluster.tell(nodes[0], CacheRemoved(hashes)) for hashes in gone]),  # type: ignore[misc]
    )
    show("a node is lost", timed([lambda name=name: index.forget(name) for name in nodes[: len(nodes) // 2]]))  # type: ignore[misc]
    return 0


if __name__ == "__main__":
    sys.exit(main())
