"""Load on a running cluster: `kvrelay up` in one terminal, `make bench` in another.

Prompts are random token ids, so nothing is cached unless --shared-tokens says so. Reported is what a client sees.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence

from kvrelay.client import AsyncClient
from kvrelay.client_answer import ClientAnswer, percentiles
from kvrelay.client_command import DEFAULT_ADDRESS
from kvrelay.client_command import run as run_command
from kvrelay.inference import TokenPrompt
from kvrelay.sampling import SamplingParams


async def measure(client: AsyncClient, token_ids: tuple[int, ...], max_tokens: int) -> ClientAnswer:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    answer = ClientAnswer(time.monotonic())
    async for event in client.generate(TokenPrompt(token_ids), sampling):
        answer.add(event, time.monotonic())
    return answer


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

        async def one(prompt: tuple[int, ...]) -> ClientAnswer:
            async with room:
                return await measure(client, prompt, options.max_tokens)

        started = time.perf_counter()
        seen = await asyncio.gather(*(one(prompt) for prompt in prompts))
        return summary(seen, time.perf_counter() - started)


def summary(answers: Sequence[ClientAnswer], wall_s: float) -> dict[str, float]:
    firsts = [answer.first_token_s for answer in answers]
    p50, p95 = percentiles([gap for answer in answers for gap in answer.gaps_s])
    return {
        "requests": len(answers),
        "wall_s": round(wall_s, 3),
        "output_tokens_per_s": round(sum(len(answer.tokens) for answer in answers) / wall_s, 1),
        "cached_prompt_tokens": sum(answer.finished.usage.cached.total for answer in answers if answer.finished),
        "ttft_p50_ms": round(1e3 * statistics.median(firsts), 1),
        "ttft_max_ms": round(1e3 * max(firsts), 1),
        "inter_token_p50_ms": round(1e3 * p50, 1),
        "inter_token_p95_ms": round(1e3 * p95, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    address = os.environ.get("KVRELAY_ADDRESS", DEFAULT_ADDRESS)
    whose = f"of the coordinator (default: KVRELAY_ADDRESS, else {DEFAULT_ADDRESS})"
    parser.add_argument("--address", default=address, help=whose)
    parser.add_argument("--requests", type=int, default=16, help="how many in all (default: 16)")
    parser.add_argument("--concurrency", type=int, default=4, help="how many at a time (default: 4)")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of each prompt (default: 256)")
    parser.add_argument("--shared-tokens", type=int, default=0, help="leading tokens that all prompts have in common")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer (default: 64)")
    parser.add_argument("--seed", type=int, default=time.time_ns(), help="of the prompts; the same one hits the cache")
    options = parser.parse_args()
    if not 0 <= options.shared_tokens <= options.prompt_tokens or options.concurrency < 1 or options.requests < 1:
        parser.error("prompts have at least their shared tokens, and there is at least one request")

    async def work() -> None:
        print(json.dumps(await run(options), indent=2))

    return run_command("bench", options.address, work)


if __name__ == "__main__":
    sys.exit(main())
