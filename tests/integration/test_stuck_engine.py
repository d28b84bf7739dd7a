"""An engine that finishes no step while its node's event loop lives: the node's own watchdog ends its calls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from decode_node.app import DecodeApp
from decode_node.config import DecodeConfig
from kvrelay.client import AnswerEvent
from kvrelay.errors import UnavailableError
from kvrelay.inference import RequestFinished, TokenPrompt, TokensGenerated
from kvrelay.messages import NodeRequest
from kvrelay.rpc.calls import Replies
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.nodes import DecodeClient, PrefillClient
from kvrelay.sampling import SamplingParams
from kvrelay.types import InstanceId, RequestId
from prefill_node.app import PrefillApp
from prefill_node.config import PrefillConfig
from tests.support.coordinator_ends import ends, greedy
from tests.support.hosting import hosted
from tests.support.tiny_model import make_tiny_model

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
WATCHDOG_S = 2.0  # longer than a step takes on a busy machine
TIMEOUT_S = 120.0
REQUEST = NodeRequest(RequestId("r"), tuple(range(3, 53)), 50, SamplingParams(temperature=0.0, seed=1, max_tokens=900))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=5)


def settings(model: Path) -> Any:
    return {"model": model, "dtype": "float32", "threads": 1, "num_blocks": 64, "watchdog_s": WATCHDOG_S}


@asynccontextmanager
async def stuck(app: DecodeApp | PrefillApp) -> AsyncIterator[None]:
    """Inside, the engine thread stands still."""
    may_go_on = threading.Event()
    app.host.engine.post(lambda core: may_go_on.wait(TIMEOUT_S))
    try:
        yield
    finally:
        may_go_on.set()


@asynccontextmanager
async def served(app: DecodeApp | PrefillApp) -> AsyncIterator[grpc.aio.Channel]:
    async with hosted(app) as address, open_channel(address) as channel:
        yield channel


async def health(channel: grpc.aio.Channel, service: str = "kvrelay.pb.Decode") -> list[int]:
    """What a load balancer would be told: of the process and of its service."""
    stub = health_pb2_grpc.HealthStub(channel)
    return [(await stub.Check(health_pb2.HealthCheckRequest(service=name))).status for name in ("", service)]


async def until_dead(channel: grpc.aio.Channel) -> None:
    """Until the process says that only a restart helps, as a supervisor hears it that watches."""
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service="liveness")
    async with Replies(stub.Watch(request), lambda reply: reply.status) as statuses:
        assert await anext(statuses) == SERVING
        assert await anext(statuses) == NOT_SERVING
    assert (await stub.Check(request)).status == NOT_SERVING


async def test_a_decode_call_ends_and_its_blocks_come_back_with_the_engine(model: Path) -> None:
    app = DecodeApp(DecodeConfig(**settings(model)), InstanceId("decode"), CollectorRegistry())
    async with asyncio.timeout(TIMEOUT_S), served(app) as channel:
        client = DecodeClient(channel)
        granted = await client.reserve(REQUEST, 950, TIMEOUT_S)
        async with client.decode(granted.reservation_id, compute_tail=True) as events, stuck(app):
            with pytest.raises(UnavailableError, match="engine is stuck; resume on another"):
                async for _ in events:
                    pass
            assert (app.status().ready, app.status().not_ready_reason) == (False, "the engine is stuck")
            assert app.host.readiness.reason == "the engine has not finished a step for too long"
            assert await health(channel) == [NOT_SERVING] * 2
        while not (app.status().ready and app.host.readiness.ready) or app.status().blocks.held:
            await asyncio.sleep(0.01)  # the watchdog looks four times a second
        assert await health(channel) == [SERVING] * 2


async def test_only_a_hang_of_six_watchdogs_ends_liveness_and_its_end_brings_it_back(model: Path) -> None:
    quick = settings(model) | {"watchdog_s": 0.5}
    app = DecodeApp(DecodeConfig(**quick), InstanceId("decode"), CollectorRegistry())
    async with asyncio.timeout(TIMEOUT_S), served(app) as channel:
        started = time.monotonic()
        async with stuck(app):
            await until_dead(channel)
            assert time.monotonic() - started >= 6 * 0.5
            assert not app.host.readiness.ready
        while not (app.host.readiness.alive and app.host.readiness.ready):
            await asyncio.sleep(0.01)  # the watchdog looks four times a second


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_dead_engine_thread_ends_liveness_at_once(model: Path) -> None:
    app = DecodeApp(DecodeConfig(**settings(model)), InstanceId("decode"), CollectorRegistry())
    async with asyncio.timeout(TIMEOUT_S), served(app) as channel:
        dying = asyncio.create_task(until_dead(channel))
        app.host.engine.post(_end_the_thread)
        await dying
        assert await health(channel) == [NOT_SERVING] * 2


def _end_the_thread(core: object) -> None:
    raise SystemExit


async def test_a_prefill_call_ends(model: Path) -> None:
    app = PrefillApp(PrefillConfig(**settings(model)), InstanceId("prefill"), CollectorRegistry())
    async with (
        asyncio.timeout(TIMEOUT_S),
        served(app) as channel,
        stuck(app),
        PrefillClient(channel).prefill(REQUEST, None) as events,
    ):
        with pytest.raises(UnavailableError, match="engine is stuck; use another"):
            await anext(events)
        assert not app.status().ready
        assert app.status().not_ready_reason == "the engine has not finished a step for too long"
        assert await health(channel, "kvrelay.pb.Prefill") == [NOT_SERVING] * 2


async def test_an_answer_goes_on_elsewhere(model: Path) -> None:
    """The engine that decodes it stops in the middle; the client sees a pause, and every token once."""
    prompt, sampling = TokenPrompt(REQUEST.token_ids), greedy(max_tokens=600, ignore_eos=True)
    async with asyncio.timeout(TIMEOUT_S), AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(ends(num_prefill=0, num_decode=0))
        common = settings(model) | {"coordinator": (cluster.address,)}
        prefill = PrefillApp(PrefillConfig(**common), InstanceId("prefill"), CollectorRegistry())
        decode = [
            DecodeApp(DecodeConfig(**common), InstanceId(f"decode-{number}"), CollectorRegistry()) for number in (1, 2)
        ]
        for app in (prefill, *decode):
            await stack.enter_async_context(hosted(app))
        await cluster.until_status(lambda status: sum(node.status.ready for node in status.nodes) == 3)
        expected = await cluster.ask(prompt, sampling)
        events = aiter(cluster.client.generate(prompt, sampling))
        begun: list[AnswerEvent] = []
        while sum(len(event.tokens) for event in begun if isinstance(event, TokensGenerated)) < 2:
            begun.append(await anext(events))  # the first token comes with the handoff, the next from the engine
        (running,) = [app for app in decode if app.status().num_running]
        async with stuck(running):
            rest = [event async for event in events]
        tokens = [token for event in (*begun, *rest) if isinstance(event, TokensGenerated) for token in event.tokens]
        assert tuple(token.token_id for token in tokens) == expected.token_ids
        finished = rest[-1]
        assert isinstance(finished, RequestFinished)
        assert (finished.retries, finished.usage.completion_tokens) == (1, 600)
