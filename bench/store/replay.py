"""`python -m bench.store.replay`: the block hit rates of the store's own eviction on public traces, beside others'.

A request hits the longest prefix that is held; the rest of its blocks are put after it, as a prefill node does. No
bytes move and no time passes: a block counts 1. The store's column runs kvstore.index, which the store runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.store.chart import Line, line_chart
from bench.store.foresight import ForesightCache
from bench.store.mooncake import TRACES, num_distinct, read_trace
from bench.store.policies import NOWHERE, POLICIES, Cache
from kvstore.block import DEFAULT_TENANT, BlockInfo
from kvstore.index import TierIndex
from kvstore.quotas import Quotas
from kvstore.reuse import Reuse

CAPACITIES = (1000, 3000, 10_000, 30_000, 50_000)  # blocks of 512 tokens
QUICK_CAPACITIES = (1000, 10_000)
OURS = "kvrelay"
FORESIGHT = "foresight"
THRESHOLDS = (0.05, 0.2, 0.25)
REUSE_CAPACITY = 30_000


@dataclass(frozen=True, slots=True)
class Rates:
    """Share of a trace's blocks that were hit, by policy, at each of `capacities`."""

    trace: str
    num_blocks: int
    num_distinct: int
    infinite: float
    capacities: Sequence[int]
    by_policy: dict[str, list[float]]


class StoreIndex:
    """The store's own books as a cache of the replay. `index` may be looked at."""

    def __init__(self, capacity: int) -> None:
        self.index = TierIndex(capacity, Quotas())
        self._depths = {NOWHERE: -1}

    def __contains__(self, block: object) -> bool:
        return isinstance(block, int) and _key(block) in self.index

    def hit(self, block: int) -> None:
        self.index.hit((_key(block),), 0.0)

    def put(self, block: int, parent: int) -> None:
        self._depths[block] = self._depths[parent] + 1
        info = BlockInfo(_key(block), _key(parent), self._depths[block], DEFAULT_TENANT, 0.0)
        held_parent = parent == NOWHERE or info.parent in self.index
        if held_parent and self.index.make_room(1, info.tenant, 0.0, keep=(info.parent,)) is not None:
            self.index.add(info, 1, 0.0)


def replay(requests: list[list[int]], cache: Cache, begin: Callable[[int], None] = lambda _: None) -> float:
    """The share of blocks that were hit. `begin` is told each request's number before it is served."""
    num_hit = 0
    for number, blocks in enumerate(requests):
        begin(number)
        num_held = next((place for place, block in enumerate(blocks) if block not in cache), len(blocks))
        num_hit += num_held
        for block in blocks[:num_held]:
            cache.hit(block)
        parents = [NOWHERE, *blocks]
        for place in range(num_held, len(blocks)):
            if blocks[place] not in cache:
                cache.put(blocks[place], parents[place])
    return num_hit / sum(map(len, requests))


def measure(trace: str, capacities: Sequence[int]) -> Rates:
    requests = read_trace(trace)
    policies: dict[str, list[float]] = {name: [] for name in (*POLICIES, OURS, FORESIGHT)}
    for capacity in capacities:
        for name, make in POLICIES.items():
            policies[name].append(replay(requests, make(capacity)))
        policies[OURS].append(replay(requests, StoreIndex(capacity)))
        seer = ForesightCache(capacity, requests)
        policies[FORESIGHT].append(replay(requests, seer, seer.begin))
    distinct = num_distinct(requests)
    num_blocks = sum(map(len, requests))
    return Rates(trace, num_blocks, distinct, 1 - distinct / num_blocks, capacities, policies)


class MeasuredStore(StoreIndex):
    """Stores only what kvstore.reuse holds to be worth it."""

    def __init__(self, capacity: int, threshold: float) -> None:
        super().__init__(capacity)
        self.num_stored = 0
        self._reuse = Reuse(threshold)

    def hit(self, block: int) -> None:
        if self.index.hits(_key(block)) == 0:
            self._reuse.reused(self._depths[block])
        super().hit(block)

    def put(self, block: int, parent: int) -> None:
        place = self._depths[block] = self._depths[parent] + 1
        if not self._reuse.worth(place):
            return
        super().put(block, parent)
        if block in self:
            self._reuse.stored(place)
            self.num_stored += 1


def rates_table(rates: Rates) -> str:
    """Markdown, hit rates in per cent."""
    names = [*POLICIES, OURS, FORESIGHT]
    rows = [["blocks", *names], ["--:"] * (len(names) + 1)]
    for place, capacity in enumerate(rates.capacities):
        rows.append([f"{capacity:,}", *(f"{100 * rates.by_policy[name][place]:.1f}" for name in names)])
    rows.append([f"all {rates.num_distinct:,}", *[f"{100 * rates.infinite:.1f}"] * len(names)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def reuse_table(traces: Sequence[str], thresholds: Sequence[float]) -> str:
    """Markdown: what storing less costs."""
    rows = [["trace", "threshold", "blocks stored", "hit rate"], [":--", "--:", "--:", "--:"]]
    for trace in traces:
        requests = read_trace(trace)
        for threshold in (0.0, *thresholds):
            store = MeasuredStore(REUSE_CAPACITY, threshold)
            rate = replay(requests, store)
            rows.append([trace, f"{threshold:.0%}", f"{store.num_stored:,}", f"{100 * rate:.1f}"])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def chart(rates: Rates) -> str:
    """SVG."""
    lines = [
        Line(name, list(zip(rates.capacities, (100 * rate for rate in rates.by_policy[name]), strict=True)))
        for name in (*POLICIES, OURS, FORESIGHT)
    ]
    title = f"{rates.trace} trace: block hit rate in per cent, by capacity in blocks of 512 tokens"
    return line_chart(title, lines, emphasis=OURS, ceiling=("infinite store", 100 * rates.infinite))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.store.replay", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one trace, two capacities; half a minute")
    parser.add_argument("--svg", type=Path, metavar="DIR", help="write a chart of each trace there")
    arguments = parser.parse_args(argv)
    traces = TRACES[1:] if arguments.quick else TRACES
    for trace in traces:
        rates = measure(trace, QUICK_CAPACITIES if arguments.quick else CAPACITIES)
        print(
            f"\n{trace}: hit rate of {rates.num_blocks:,} blocks asked for, per cent\n\n{rates_table(rates)}",
            flush=True,
        )
        if arguments.svg is not None:
            (arguments.svg / f"kvstore_{trace}.svg").write_text(chart(rates), encoding="utf-8")
    print(f"\nstoring only places in a chain that are used again often enough\n\n{reuse_table(traces, THRESHOLDS)}")
    return 0


def _key(block: int) -> bytes:
    return block.to_bytes(8, "big", signed=True)


if __name__ == "__main__":
    sys.exit(main())
