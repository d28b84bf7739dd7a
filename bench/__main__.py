"""Load on a running cluster: `kvrelay up` in one terminal, `make bench` in another.

Prompts are random token ids, so nothing is cached unless --shared-tokens says so. Reported is what a client sees.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.client import AsyncClient
from kvrelay.errors import KVRelayError
from kvrelay.inference import RequestFinished, TokenPrompt, TokensGenerated
from kvrelay.sampling import SamplingParams


@dataclass(slots=True)
class Observed:
    """One request; seconds."""

    first_token_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_cached: int = 0


async def measure(client: AsyncClient, token_ids: tuple[int, ...], max_tokens: int) -> Observed:
    observed = Observed()
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    started = last = time.perf_counter()
    async for event in client.generate(TokenPrompt(token_ids), sampling):
        now = time.perf_counter()
        if isinstance(event, TokensGenerated) and event.tokens:
            if observed.num_tokens:
                observed.gaps_s += [(now - last) / len(event.tokens)] * len(event.tokens)
            else:
                observed.first_token_s = now - started
            observed.num_tokens += len(event.tokens)
            last = now
        elif isinstance(event, RequestFinished):
            observed.num_cached = event.usage.cached.total
    return observed


async def run(options: argparse.Namespace) -> dict[str, float]:
    async with AsyncClient(options.address) as client:
        model = await client.get_model()
        draw = random.Random(options.seed)
        shared = [draw.randrange(model.vocab_size) for _ in range(options.shared_tokens)]
        num_own = options.prompt_tokens - options.shared_tokens
        prompts = [
            (*shared, *(draw.randrange(model.vocab_size) for _ in range(num_own))) for _ in range(options.requests)
        ]
        room = asyncio.Semaphore(options.concurrency)

        async def one(prompt: tuple[int, ...]) -> Observed:
            async with room:
                return await measure(client, prompt, options.max_tokens)

        started = time.perf_counter()
        seen = await asyncio.gather(*(one(prompt) for prompt in prompts))
        return summary(seen, time.perf_counter() - started)


def summary(seen: Sequence[Observed], wall_s: float) -> dict[str, float]:
    firsts = [entry.first_token_s for entry in seen]
    gaps = [gap for entry in seen for gap in entry.gaps_s] or [0.0]
    return {
        "requests": len(seen),
        "wall_s": round(wall_s, 3),
        "output_tokens_per_s": round(sum(entry.num_tokens for entry in seen) / wall_s, 1),
        "cached_prompt_tokens": sum(entry.num_cached for entry in seen),
        "ttft_p50_ms": round(1e3 * statistics.median(firsts), 1),
        "ttft_max_ms": round(1e3 * max(firsts), 1),
        "inter_token_p50_ms": round(1e3 * statistics.median(gaps), 1),
        "inter_token_p95_ms": round(1e3 * sorted(gaps)[int(0.95 * (len(gaps) - 1))], 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:7400", help="of the coordinator (default: 127.0.0.1:7400)")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--shared-tokens", type=int, default=0, help="leading tokens that all prompts have in common")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=time.time_ns(), help="of the prompts; the same one hits the cache")
    options = parser.parse_args()
    if not 0 <= options.shared_tokens <= options.prompt_tokens or options.concurrency < 1 or options.requests < 1:
        parser.error("prompts have at least their shared tokens, and there is at least one request")
    try:
        print(json.dumps(asyncio.run(run(options)), indent=2))
    except KVRelayError as error:
        print(f"bench: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
