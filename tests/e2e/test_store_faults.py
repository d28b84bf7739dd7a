"""A kvstore that is stopped, stuck, slow or lying, between real processes: every answer stays right, and the store is
used again when it is well.

The pools are so small that a prompt is in none of them when it is asked for again: it comes from the store, or is
computed. The tiny model computes in less time than a load takes, so the nodes are told to wait for the store; how long
a first token takes beside one is what the benchmark of the store measures, with a model for which it matters.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from tests.support.answers import ask, wait_until_quiet
from tests.support.cluster import running
from tests.support.link_faults import Direction
from tests.support.proxied_cluster import ProxiedCluster
from tests.support.reference import ReferenceEngine
from tests.support.soak import TIMEOUT_S
from tests.support.tiny_requests import expected, greedy, random_prompt, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(TIMEOUT_S)]

NUM_NODES = 2
NUM_BLOCKS = 24  # two prompts of 160 tokens
PROMPTS = [random_prompt(160, 700 + number) for number in range(4)]
NUM_PROMPT_BLOCKS = 10
SHARED_BLOCKS = 9  # the last token is computed in any case
OUTCOMES = "kvrelay_store_load_outcomes_total"


@pytest.fixture(scope="module", params=["always", "measured"])
def cluster(
    model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[ProxiedCluster]:
    shape = ProxiedCluster(
        model,
        tmp_path_factory.mktemp("cluster"),
        num_blocks=NUM_BLOCKS,
        prefill_args=["--prefix-load", request.param, "--load-limit-s", "1"],
    )
    with running(shape) as started:
        yield started
        assert "Traceback" not in started.logs()


@pytest.fixture
async def client(cluster: ProxiedCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.address) as client:
        yield client
        await wait_until_quiet(client, NUM_NODES)


def stop(cluster: ProxiedCluster) -> None:
    assert cluster.store is not None
    cluster.store.signal(signal.SIGSTOP)


def stick(cluster: ProxiedCluster) -> None:
    cluster.proxies["kvstore-0"].pause()


def slow_down(cluster: ProxiedCluster) -> None:
    """A prompt's 9 blocks of 8 KiB take 2 s."""
    cluster.proxies["kvstore-0"].throttle(40_000)


def lie(cluster: ProxiedCluster) -> None:
    cluster.proxies["kvstore-0"].corrupt(direction=Direction.TO_CLIENT, num_frames=1_000)


def end_fault(cluster: ProxiedCluster) -> None:
    assert cluster.store is not None
    cluster.store.signal(signal.SIGCONT)
    cluster.proxies["kvstore-0"].heal()


async def ask_all(client: AsyncClient, reference: ReferenceEngine) -> int:
    """Asks every prompt and compares each answer; how many tokens came from the store."""
    num_loaded = 0
    for prompt_ids in PROMPTS:
        answer = await ask(client, prompt_ids, greedy(4))
        assert answer.token_ids == expected(reference, prompt_ids, 4)
        cached = answer.finished.usage.cached
        num_loaded += cached.memory + cached.disk
    return num_loaded


async def fill_store(cluster: ProxiedCluster, client: AsyncClient, reference: ReferenceEngine) -> None:
    """Returns when the store has every prompt; it takes blocks again a while after a fault."""
    prefill = cluster.prefill[0]
    if prefill.metric("kvrelay_store_offloaded_total") == 0:
        await ask_all(client, reference)
        blocks = NUM_PROMPT_BLOCKS * len(PROMPTS)
        await wait_until(
            lambda: prefill.metric("kvrelay_store_offloaded_total") >= blocks, 60.0, "the prompts are in the store"
        )


@pytest.mark.parametrize("fault", [stop, stick, slow_down, lie], ids=lambda fault: fault.__name__)
async def test_answers_are_right_whatever_the_store_does(
    cluster: ProxiedCluster,
    client: AsyncClient,
    reference: ReferenceEngine,
    fault: Callable[[ProxiedCluster], None],
) -> None:
    await fill_store(cluster, client, reference)
    always = "always" in cluster.prefill[0].args
    fault(cluster)
    try:
        for _ in range(2):
            num_loaded = await ask_all(client, reference)
            if fault is lie:
                assert num_loaded == 0
    finally:
        end_fault(cluster)
    if always:
        assert cluster.prefill[0].metric("kvrelay_store_failures_total") > 0
        found = 0
        for _ in range(200):  # until the circuit lets the store be asked again
            found = await ask_all(client, reference)
            if found == SHARED_BLOCKS * 16 * len(PROMPTS):
                break
        assert found == SHARED_BLOCKS * 16 * len(PROMPTS)


async def test_what_came_of_each_load_is_counted(
    cluster: ProxiedCluster, client: AsyncClient, reference: ReferenceEngine
) -> None:
    await fill_store(cluster, client, reference)
    await wait_until_quiet(client, NUM_NODES)  # a job ends after its load, and maybe after its answer
    prefill = cluster.prefill[0]
    before = prefill.metric(OUTCOMES)
    await ask_all(client, reference)
    await wait_until(lambda: prefill.metric(OUTCOMES) - before >= len(PROMPTS), 60.0, "every load has ended")
    assert prefill.metric(OUTCOMES) - before == len(PROMPTS)
    assert cluster.prefill[0].metric("kvrelay_store_load_seconds_count") >= len(PROMPTS)
