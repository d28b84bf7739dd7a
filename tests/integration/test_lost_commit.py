"""Real nodes whose word of a commit never arrives: the answer, its accounts and the nodes are as if it had."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from decode_node.app import DecodeApp
from decode_node.config import DecodeConfig
from kvrelay.errors import UnavailableError
from kvrelay.inference import TokenPrompt, Usage
from kvrelay.messages import NodeRequest
from kvrelay.rpc import convert_decode
from kvrelay.sampling import SamplingParams
from kvrelay.types import CachedTokens, InstanceId, RequestId
from prefill_node.app import PrefillApp
from prefill_node.config import PrefillConfig
from tests.support.coordinator_ends import ends, greedy
from tests.support.hosting import hosted
from tests.support.reference import ReferenceEngine
from tests.support.tiny_model import make_tiny_model

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=5)


def break_streams_after_the_commit(app: DecodeApp) -> None:
    """Before the app is hosted: each KV stream breaks off just before the answer to END."""
    receive = app._service.receive

    async def receive_and_break_off(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for event in receive(messages, context):
            if convert_decode.blocks_received_from_bytes(event).committed:
                raise UnavailableError("the connection broke")
            yield event

    app._service.receive = receive_and_break_off  # type: ignore[method-assign]


async def test_an_answer_whose_commit_was_not_confirmed(model: Path) -> None:
    reference = ReferenceEngine(model)
    async with asyncio.timeout(TIMEOUT_S), AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(ends(num_prefill=0, num_decode=0))
        common: Any = {"model": model, "dtype": "float32", "threads": 1, "num_blocks": 64}
        common["coordinator"] = (cluster.address,)
        decode = DecodeApp(DecodeConfig(**common), InstanceId("decode"), CollectorRegistry())
        break_streams_after_the_commit(decode)
        prefill = PrefillApp(PrefillConfig(**common), InstanceId("prefill"), CollectorRegistry())
        for app in (prefill, decode):
            await stack.enter_async_context(hosted(app))
        await cluster.until_status(lambda status: sum(node.status.ready for node in status.nodes) == 2)
        for num_cached, rest in ((0, range(100, 150)), (32, range(150, 200))):
            token_ids = (*range(3, 35), *rest)
            outcome = await cluster.ask(TokenPrompt(token_ids), greedy(max_tokens=8, ignore_eos=True))
            sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=8, ignore_eos=True)
            expected = reference.answer(NodeRequest(RequestId("r"), token_ids, 82, sampling))
            assert list(outcome.token_ids) == expected
            assert outcome.finished.usage == Usage(82, 8, CachedTokens(device=num_cached))
            assert outcome.finished.retries == 0
            assert outcome.finished.prefill_node
        for app in (prefill, decode):
            while app.status().blocks.held or app.status().blocks.reserved:
                await asyncio.sleep(0.01)  # the engine comes to it between two steps
