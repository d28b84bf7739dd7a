"""A process that receives KV, decodes, or both."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import uvloop

from bench.handoff.conversation import Conversation
from bench.handoff.decoding import steps_per_s
from bench.handoff.receiving import NodeSetting, Received, decode_node, serving
from bench.handoff.shared_memory import caches_in
from kvrelay.rpc.credentials import MutualTLS
from kvrelay.rpc.process import tune_malloc
from kvrelay.types import BlockId


def main() -> None:
    driver = Conversation()
    tune_malloc()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work(driver))


async def _work(driver: Conversation) -> None:
    task = driver.task
    memory = caches_in(task["memory_fd"], task["memory_offset"]) if "memory_fd" in task else contextlib.nullcontext()
    async with contextlib.AsyncExitStack() as stack:
        received = await stack.enter_async_context(decode_node(_setting(task), memory))
        port = await stack.enter_async_context(serving(received.node, read_tls(task)))
        driver.tell(port=port)
        while order := await asyncio.to_thread(driver.next_order):
            driver.tell(**await _obey(order, received))


async def _obey(order: dict[str, Any], received: Received) -> dict[str, object]:
    if order["do"] == "decode":
        return {"steps_per_s": await steps_per_s(received, order["num_steps"])}
    if order["do"] == "look":  # whether another process wrote into a block of this one's pool
        return {"written": any(received.node.cache.read_slab(BlockId(order["block"])))}
    raise ValueError(f"{order['do']} is nothing that a receiver does")


def _setting(task: dict[str, Any]) -> NodeSetting:
    model = Path(task["model"]) if "model" in task else None
    engine_cpus = tuple(task.get("engine_cpus", ()))
    return NodeSetting(task["shape"], task["num_blocks"], model, engine_cpus, task.get("num_extra_blocks", 0))


def read_tls(task: dict[str, Any]) -> MutualTLS | None:
    """From files, if the task names them."""
    return MutualTLS.read(*map(Path, task["tls"])) if "tls" in task else None


if __name__ == "__main__":
    main()
