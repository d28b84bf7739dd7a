"""`kvrelay store warm`: has the cluster compute the prefixes of prompts, and waits until a store holds them."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass

from kvrelay.client import AsyncClient
from kvrelay.client_command import write
from kvrelay.errors import KVRelayError, UnavailableError
from kvrelay.inference import RequestFinished
from kvrelay.kv.remote_admin import StoreAdmin
from kvrelay.kv.store_messages import StoreNamespace
from kvrelay.progress_bar import ProgressBar
from kvrelay.rpc.credentials import peer_tls_of
from kvrelay.sampling import SamplingParams
from kvrelay.store_targets import served_namespace, store_addresses
from kvrelay.types import BlockHash, Tier
from kvrelay.warm_prompts import CacheWishes, WarmPrompt, read_lines, read_prompts

POLL_S = 0.2  # another process's store can only be asked again


@dataclass(frozen=True, slots=True)
class Warmed:
    """What came of a line. `is_stored` is True also where there is nothing to store: no block of the prompt is full."""

    line: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefix_hash: str = ""
    is_stored: bool = False
    error: str = ""


async def warm(options: argparse.Namespace) -> None:
    own = CacheWishes(options.cache_salt, options.public_cache, options.cache_ttl)
    prompts = list(read_prompts(read_lines(options.file), own))
    namespace = await served_namespace(options)
    async with AsyncExitStack() as closing:
        opened = [StoreAdmin(one, tls=peer_tls_of()) for one in await store_addresses(options)]
        stores = [await closing.enter_async_context(one) for one in opened]
        client = await closing.enter_async_context(AsyncClient(options.address))
        warming = Warming(client, stores, namespace, wait_s=options.wait, timeout_s=options.timeout)
        with ProgressBar("warm", "prompt") as bar:
            warmed = await warming.run(prompts, options.concurrency, bar)
    _print(options, warmed)
    num_failed = sum(not one.is_stored for one in warmed)
    if num_failed:
        raise KVRelayError(f"{num_failed} of {len(warmed)} prompts are in no store")


class Warming:
    """Asks for one token of each prompt, which computes its KV; nodes then offload it on their own."""

    def __init__(
        self,
        client: AsyncClient,
        stores: Sequence[StoreAdmin],
        namespace: StoreNamespace,
        *,
        wait_s: float,
        timeout_s: float,
    ) -> None:
        self._client = client
        self._stores = stores
        self._namespace = namespace
        self._wait_s = wait_s
        self._timeout_s = timeout_s

    async def run(self, prompts: Sequence[WarmPrompt], concurrency: int, bar: ProgressBar) -> list[Warmed]:
        """In the order of the lines; a prompt that fails is no reason to leave the others."""
        waiting = iter(prompts)
        warmed: list[Warmed] = []

        async def work() -> None:
            for prompt in waiting:
                warmed.append(await self._warm(prompt))
                bar.show(len(warmed), len(prompts))

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
        return sorted(warmed, key=lambda one: one.line)

    async def _warm(self, prompt: WarmPrompt) -> Warmed:
        try:
            finished = await self._compute(prompt)
            is_stored = not finished.prefix_hash or await self._is_stored(BlockHash(finished.prefix_hash))
        except KVRelayError as error:
            return Warmed(prompt.line, error=error.message)
        return Warmed(
            prompt.line,
            finished.usage.prompt_tokens,
            finished.usage.cached.total,
            finished.prefix_hash.hex(),
            is_stored,
            "" if is_stored else f"no store holds it after {self._wait_s:g} s",
        )

    async def _compute(self, prompt: WarmPrompt) -> RequestFinished:
        events = self._client.generate(
            prompt.prompt,
            SamplingParams(temperature=0.0, max_tokens=1),
            cache_salt=prompt.cache.salt,
            public_cache=prompt.cache.public,
            cache_ttl_s=prompt.cache.ttl_s,
            timeout_s=self._timeout_s,
        )
        finished = [event async for event in events if isinstance(event, RequestFinished)]
        if not finished:
            raise UnavailableError("the answer ended before it was complete")
        return finished[0]

    async def _is_stored(self, block_hash: BlockHash) -> bool:
        """The last block is enough to ask for: a store takes and keeps no block without those before it."""
        deadline = time.monotonic() + self._wait_s
        while True:
            if await self._is_anywhere(block_hash):
                return True
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(POLL_S)

    async def _is_anywhere(self, block_hash: BlockHash) -> bool:
        """A store that fails may have it, but another one that has it is as good; raises when all of them fail."""
        failures: list[KVRelayError] = []
        for store in self._stores:
            try:
                if (await store.find(self._namespace, [block_hash])) != [Tier.NONE]:
                    return True
            except KVRelayError as error:
                failures.append(error)
        if len(failures) == len(self._stores):
            raise failures[0]
        return False


def _print(options: argparse.Namespace, warmed: Sequence[Warmed]) -> None:
    if options.json:
        write(json.dumps({"prompts": [asdict(one) for one in warmed]}) + "\n")
        return
    stored = [one for one in warmed if one.is_stored and one.prefix_hash]
    num_short = sum(one.is_stored and not one.prefix_hash for one in warmed)
    lines = [f"line {one.line}: {one.error}" for one in warmed if one.error]
    num_tokens = sum(one.prompt_tokens for one in stored)
    lines.append(f"{len(stored):,} of {len(warmed):,} prompts are in a store, {num_tokens:,} tokens")
    lines += [f"{num_short:,} are shorter than a block"] if num_short else []
    write("\n".join(lines) + "\n")
