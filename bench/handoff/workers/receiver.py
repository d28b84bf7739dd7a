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
from bench.handoff.shapes import info_of
from bench.handoff.shared_memory import memory_in
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
    async with contextlib.AsyncExitStack() as stack:
        received = await stack.enter_async_context(decode_node(_setting(task)))
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
    num_extra_blocks = task.get("num_extra_blocks", 0)
    memory = None
    if "memory_fd" in task:
        num_bytes = (task["num_blocks"] + num_extra_blocks + 1) * info_of(task["shape"]).layout.slab_bytes
        memory = memory_in(task["memory_fd"], num_bytes, task["memory_offset"])
    return NodeSetting(task["shape"], task["num_blocks"], model, engine_cpus, num_extra_blocks, memory)


def read_tls(task: dict[str, Any]) -> MutualTLS | None:
    """From files, if the task names them."""
    return MutualTLS.read(*map(Path, task["tls"])) if "tls" in task else None


if __name__ == "__main__":
    main()
