"""How far from the truth the coordinator's forecasts are: `python -m bench.forecast`.

A real cluster on loopback, coordinator, kvstore, prefill and decode node, is asked by so many clients at a time; each
asks again once it has its answer. Prompts have 32 to 1,024 tokens, a third of them a common beginning of 256, and
answers 8 to 64. Forecasts are made when a request is placed; what came is counted by the coordinator, in
`kvrelay_prediction_error_seconds` and `kvrelay_prediction_ratio`, so percentiles are as fine as their buckets.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench.__main__ import measure
from kvrelay.client import AsyncClient
from kvrelay.client_answer import percentiles
from kvrelay.demo_model import DEMO_MODEL, fetch
from tests.support.cluster import Cluster, RoleProcess, running

VOCAB = range(10, 40_000)
SHARED_TOKENS = 256
NUM_WARM = 12
METRICS = ("kvrelay_prediction_error_seconds", "kvrelay_prediction_ratio")

Buckets = dict[float, float]  # upper bound: how many were not above it


def buckets(role: RoleProcess, name: str, of: str) -> Buckets:
    with urllib.request.urlopen(f"http://127.0.0.1:{role.metrics_port}/metrics", timeout=5) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    samples = [one for family in families for one in family.samples if one.name == f"{name}_bucket"]
    return {float(one.labels["le"]): one.value for one in samples if one.labels["of"] == of}


def counts(before: Buckets, after: Buckets) -> list[tuple[float, float, float]]:
    """How many came meanwhile, by bucket: its bounds and the count."""
    bounds = sorted(after)
    totals = [after[bound] - before[bound] for bound in bounds]
    lows = [-math.inf, *bounds[:-1]]
    return [
        (low, high, total - less)
        for low, high, total, less in zip(lows, bounds, totals, [0, *totals[:-1]], strict=True)
    ]


def of_distances(seen: Sequence[tuple[float, float, float]], origin: float, part: float) -> float:
    """The distance from `origin` that so large a part of what was seen does not exceed, each bucket's spread evenly."""
    folded = sorted((*sorted((abs(low - origin), abs(high - origin))), count) for low, high, count in seen if count)
    wanted, done = part * sum(count for *_, count in folded), 0.0
    for low, high, count in folded:
        if done + count >= wanted:
            return low if math.isinf(high) else low + (high - low) * (wanted - done) / count
        done += count
    return 0.0


async def ask(address: str, prompts: Sequence[tuple[tuple[int, ...], int]], concurrency: int) -> list[float]:
    """Seconds until each first token, as the client sees it."""
    room = asyncio.Semaphore(concurrency)

    async with AsyncClient(address) as client:

        async def one(token_ids: tuple[int, ...], max_tokens: int) -> float:
            async with room:
                return (await measure(client, token_ids, max_tokens)).first_token_s

        return await asyncio.gather(*(one(*prompt) for prompt in prompts))


def draw(source: random.Random, shared: Sequence[int], count: int) -> list[tuple[tuple[int, ...], int]]:
    prompts = []
    for _ in range(count):
        own = source.choices(VOCAB, k=int(math.exp(source.uniform(math.log(32), math.log(1_024)))))
        with_shared = source.random() < 1 / 3
        prompts.append(((*shared, *own[: 1_024 - len(shared)]) if with_shared else tuple(own), source.randint(8, 64)))
    return prompts


def run(options: argparse.Namespace, directory: Path) -> None:
    source = random.Random(options.seed)
    shared = source.choices(VOCAB, k=SHARED_TOKENS)
    node_args = ["--threads", str(options.threads)]
    cluster = Cluster(
        *(options.model or fetch(), directory),
        dtype="bfloat16",
        num_blocks=4_096,
        prefill_args=node_args,
        decode_args=node_args,
    )
    with running(cluster):
        asyncio.run(ask(cluster.address, draw(source, shared, NUM_WARM), 1))
        name = DEMO_MODEL.file_name if options.model is None else options.model.name
        print(f"{name}, {options.threads} thread(s) a node")
        print(
            "| clients | requests | TTFT p50 / p95 | error of TTFT p50 / p95 | of it | error of ITL p50 / p95 | of it |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for concurrency in options.concurrency:
            before = {(name, of): buckets(cluster.coordinator, name, of) for name in METRICS for of in ("ttft", "itl")}
            prompts = draw(source, shared, options.requests)
            firsts = asyncio.run(ask(cluster.address, prompts, concurrency))
            time.sleep(0.2)  # the last answers' ends
            cells = []
            for of in ("ttft", "itl"):
                errors, ratios = (counts(before[name, of], buckets(cluster.coordinator, name, of)) for name in METRICS)
                cells.append(" / ".join(f"{1e3 * of_distances(errors, 0.0, part):.0f}" for part in (0.5, 0.95)) + " ms")
                cells.append(" / ".join(f"{1e2 * of_distances(ratios, 1.0, part):.0f}" for part in (0.5, 0.95)) + " %")
            seen = " / ".join(f"{1e3 * seconds:.0f}" for seconds in percentiles(firsts))
            print(f"| {concurrency} | {len(prompts)} | {seen} ms | {' | '.join(cells)} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.forecast", description=__doc__)
    parser.add_argument("--model", type=Path, help="GGUF file or Hugging Face directory (default: the demo model)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16], help="clients (default: 1 4 16)")
    parser.add_argument("--requests", type=int, default=64, help="of each number of clients (default: 64)")
    parser.add_argument("--threads", type=int, default=1, help="of each node (default: 1)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvrelay-forecast-") as directory:
        run(options, Path(directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
