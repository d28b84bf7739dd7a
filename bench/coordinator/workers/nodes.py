"""The process of all fake nodes."""

from __future__ import annotations

import asyncio

import uvloop

from bench.coordinator.fake_nodes import FakeDecodeNode, FakePrefillNode
from bench.handoff.conversation import Conversation


def main() -> None:
    driver = Conversation()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(driver))


async def _serve(driver: Conversation) -> None:
    task, pace = driver.task, {"tokens_per_s": 0.0}
    count = task["decode"]
    decode = [
        FakeDecodeNode(number, task["num_blocks"], number / count, lambda: pace["tokens_per_s"])
        for number in range(count)
    ]
    nodes = [*decode, *(FakePrefillNode(number, decode) for number in range(task["prefill"]))]
    for node in nodes:
        await node.start(task["coordinators"])
    driver.tell(decode=[node.address for node in decode])
    while order := await asyncio.to_thread(driver.next_order):
        pace |= order
        driver.tell(**pace)
    for node in nodes:
        await node.stop()


if __name__ == "__main__":
    main()
