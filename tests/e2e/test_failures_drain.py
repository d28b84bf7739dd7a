"""Ends and beginnings of a role: a second SIGTERM, and another process on the port of one that died.

SIGTERM with handoffs in flight is in test_failures_matrix.py.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from kvrelay.cluster import NodeReport
from kvrelay.errors import UnavailableError
from tests.support.answers import wait_until_quiet
from tests.support.cluster import RoleProcess, running
from tests.support.in_flight import IN_CHUNKS, LONG_ANSWER, InFlight, Reference, Stage, flight, until
from tests.support.proxied_cluster import ProxiedCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

NUM_NODES = 4
AT_ONCE_S = 20.0  # on a busy machine; the grace period is 30 s
BOUND_S = 40.0


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedCluster]:
    directory = tmp_path_factory.mktemp("drain")
    shape = ProxiedCluster(model, directory, num_prefill=2, num_decode=2, num_blocks=256, prefill_args=IN_CHUNKS)
    with running(shape) as started:
        yield started
        assert "Traceback" not in "".join(role.log_path.read_text() for role in shape.roles)


@pytest.fixture
async def client(cluster: ProxiedCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.address) as client:
        yield client
        await wait_until_quiet(client, NUM_NODES)


async def answers_right(requests: list[InFlight], reference: Reference) -> None:
    await asyncio.wait([request.task for request in requests if request.task], timeout=BOUND_S)
    for request in requests:
        assert request.error is None, f"{request}: {request.error!r}"
        assert request.finished is not None, str(request)
        assert request.token_ids == request.expected(reference), str(request)


async def stop_twice(role: RoleProcess) -> float:
    """The seconds from the second SIGTERM to the end of the process, whose exit code is 0."""
    role.signal(signal.SIGTERM)
    await until(lambda: "draining" in role.log_path.read_text().rpartition("READY")[2], "a drain")
    assert role.running
    role.signal(signal.SIGTERM)
    second_at = time.monotonic()
    assert await asyncio.to_thread(role.wait) == 0
    return time.monotonic() - second_at


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_a_second_sigterm_stops_a_node_at_once_and_its_work_goes_on_elsewhere(
    cluster: ProxiedCluster, client: AsyncClient, reference: Reference, kind: str
) -> None:
    node = (cluster.prefill if kind == "prefill" else cluster.decode)[0]
    async with flight(cluster, node, seed=500_000 if kind == "prefill" else 510_000) as under_way:
        await under_way.launch_held(Stage.MID_STREAM)
        took_s = await stop_twice(node)
        under_way.release(of_victim=False)
        await answers_right(under_way.requests, reference)
    assert took_s < AT_ONCE_S
    await asyncio.to_thread(node.restart)


async def test_a_second_sigterm_stops_the_coordinator_at_once_and_its_clients_are_told(
    cluster: ProxiedCluster, client: AsyncClient
) -> None:
    async with flight(cluster, cluster.coordinator, seed=520_000) as under_way:
        await under_way.launch_held(Stage.MID_STREAM)
        took_s = await stop_twice(cluster.coordinator)
        await under_way.all_over(AT_ONCE_S)
        errors = [request.error for request in under_way.requests]
    await asyncio.to_thread(cluster.coordinator.restart)  # also for the tests after one that fails
    assert took_s < AT_ONCE_S
    assert all(isinstance(error, UnavailableError) for error in errors), errors
    assert all("shutting down" in error.message for error in errors if error)


async def test_a_second_sigterm_stops_the_kvstore_at_once(cluster: ProxiedCluster, client: AsyncClient) -> None:
    """Its drain is short by itself; two signals in one breath must not make it hang or fail."""
    assert cluster.store is not None
    cluster.store.signal(signal.SIGTERM)
    cluster.store.signal(signal.SIGTERM)
    started = time.monotonic()
    assert await asyncio.to_thread(cluster.store.wait) == 0
    assert time.monotonic() - started < AT_ONCE_S
    await asyncio.to_thread(cluster.store.restart)


async def report_of(client: AsyncClient, node: RoleProcess) -> NodeReport:
    reports = (await client.status()).nodes
    (report,) = [report for report in reports if report.info.address == node.address]
    return report


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_a_node_that_comes_back_on_its_port_is_another_with_its_own_pool(
    cluster: ProxiedCluster, client: AsyncClient, reference: Reference, kind: str
) -> None:
    """Requests meant for the process that died are neither lost nor given to its successor unasked."""
    node = (cluster.prefill if kind == "prefill" else cluster.decode)[1]
    before = await report_of(client, node)
    num_blocks = node.args.index("--num-blocks") + 1
    node.args[num_blocks] = str(before.status.blocks.total // 2)
    async with flight(cluster, node, seed=530_000 if kind == "prefill" else 540_000) as under_way:
        await under_way.launch_held(Stage.MID_STREAM)
        under_way.launch(Stage.MID_DECODE, LONG_ANSWER)
        node.kill()
        node.start()
        under_way.release(of_victim=False)
        await answers_right(under_way.requests, reference)
        await asyncio.to_thread(node.wait_ready)
    await wait_until_quiet(client, NUM_NODES)
    after = await report_of(client, node)
    assert after.info.instance_id != before.info.instance_id
    assert after.status.blocks.total == before.status.blocks.total // 2
    async with flight(cluster, node, seed=550_000 if kind == "prefill" else 560_000) as under_way:
        await under_way.launch_held(Stage.BEFORE_COMMIT)  # the new one takes part
        under_way.release(of_victim=True)
        await answers_right(under_way.requests, reference)
