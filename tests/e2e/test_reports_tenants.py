"""What users of other servers reported about KV that reached the wrong hands, on real processes and a tiny model. Each
test names its source."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.client import AsyncClient
from kvrelay.errors import InvalidRequestError
from kvrelay.kv.remote_admin import StoreAdmin
from tests.support.answers import Answer, ask, wait_until_quiet
from tests.support.cluster import Cluster, RoleProcess, running
from tests.support.reference import ReferenceEngine
from tests.support.soak import TIMEOUT_S
from tests.support.stored import stored_hashes, until_stored
from tests.support.tiny_requests import expected, greedy, random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(TIMEOUT_S)]

TENANTS = ("acme", "umbrella")
NUM_NODES = 2
NUM_TOKENS = 330  # 20 full blocks of 16; the last of a prompt's blocks is always computed
NUM_CACHED = 320
ALWAYS_LOAD = ["--prefix-load", "always"]  # a model as small as this computes faster than it loads


class TwoTenants(Cluster):
    """Two coordinators of the same nodes: who asks the first is one tenant, who asks the second another one."""

    def _coordinator(self, index: int) -> RoleProcess:
        role = super()._coordinator(index)
        role.prelude = (
            "import coordinator.identity as identity; from coordinator.tenants import Tenant; "
            f"identity.identify = lambda context: identity.Identity(Tenant({TENANTS[index]!r})); "
        )
        return role


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoTenants]:
    shape = TwoTenants(model, tmp_path_factory.mktemp("cluster"), num_coordinators=2, prefill_args=ALWAYS_LOAD)
    with running(shape) as started:
        yield started
        assert "Traceback" not in started.logs()


@pytest.fixture
async def acme(cluster: TwoTenants) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.addresses[0]) as client:
        yield client
        await wait_until_quiet(client, NUM_NODES)


@pytest.fixture
async def umbrella(cluster: TwoTenants) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.addresses[1]) as client:
        yield client


def restart(*roles: RoleProcess) -> None:
    """Together: what takes long of a start is to import torch."""
    for role in roles:
        role.stop()
    for role in roles:
        role.start()
    for role in roles:
        role.wait_ready()


async def tenant_of(cluster: Cluster, answer: Answer) -> str:
    """Whose quota the prompt's last full block uses."""
    assert cluster.store is not None
    async with StoreAdmin(cluster.store.address) as admin:
        [tenant] = {b.tenant async for b in admin.list() if b.block_hash == answer.finished.prefix_hash}
    return tenant


def cached(answer: Answer) -> int:
    return answer.finished.usage.cached.total


async def test_another_tenant_never_finds_a_prompt_wherever_it_lies(
    cluster: TwoTenants, acme: AsyncClient, umbrella: AsyncClient, reference: ReferenceEngine
) -> None:
    """vllm#16016, vllm#39082, vllm#53347, sglang#9163: another tenant's prompt could be guessed block by block; and
    sglang#37160: the radix tree kept tenants apart, the store behind it did not."""
    assert cluster.store is not None
    prompt_ids = random_prompt(NUM_TOKENS, 1)
    wanted = expected(reference, prompt_ids, 4)
    first, again = [await ask(acme, prompt_ids, greedy(4)) for _ in range(2)]
    assert (cached(first), cached(again)) == (0, NUM_CACHED), "caching is on"
    guesses: list[dict[str, Any]] = [{}, {"cache_salt": "acme"}, {"cache_salt": "default"}, {"public_cache": "acme"}]
    for guess in guesses:
        answer = await ask(umbrella, prompt_ids, greedy(4), **guess)
        assert (cached(answer), answer.token_ids) == (0, wanted), f"in the nodes' pools, {guess}"
    await until_stored(cluster.store, first.finished)

    restart(*cluster.prefill, *cluster.decode)  # their pools are gone: what is found now is in the store
    await wait_until_quiet(acme, NUM_NODES)
    answer = await ask(umbrella, prompt_ids, greedy(4), cache_salt="other")
    assert (cached(answer), answer.token_ids) == (0, wanted), "in the store's memory"
    answer = await ask(acme, prompt_ids, greedy(4))
    assert answer.finished.usage.cached.memory == NUM_CACHED
    assert answer.token_ids == wanted

    restart(*cluster.prefill, *cluster.decode, cluster.store)
    await wait_until_quiet(acme, NUM_NODES)
    answer = await ask(umbrella, prompt_ids, greedy(4), cache_salt="yet another")
    assert (cached(answer), answer.token_ids) == (0, wanted), "on the store's disk"
    answer = await ask(acme, prompt_ids, greedy(4))
    assert answer.finished.usage.cached.disk == NUM_CACHED
    assert answer.token_ids == wanted


async def test_the_store_keeps_one_prompt_of_two_tenants_under_different_keys(
    cluster: TwoTenants, acme: AsyncClient, umbrella: AsyncClient
) -> None:
    """sglang#37160: look-ups and stores had no field for the salt."""
    prompt_ids = random_prompt(NUM_TOKENS, 2)
    before = await stored_hashes(cluster.store)
    ours, theirs = await ask(acme, prompt_ids, greedy(2)), await ask(umbrella, prompt_ids, greedy(2))
    await until_stored(cluster.store, ours.finished)
    await until_stored(cluster.store, theirs.finished)
    assert ours.finished.prefix_hash != theirs.finished.prefix_hash
    assert len(await stored_hashes(cluster.store) - before) == 2 * (NUM_TOKENS // 16)
    assert {await tenant_of(cluster, answer) for answer in (ours, theirs)} == set(TENANTS)


async def test_a_public_namespace_is_shared_by_those_who_name_it(
    acme: AsyncClient, umbrella: AsyncClient, reference: ReferenceEngine
) -> None:
    prompt_ids = random_prompt(NUM_TOKENS, 3)
    wanted = expected(reference, prompt_ids, 4)
    answers = [await ask(client, prompt_ids, greedy(4), public_cache="docs") for client in (acme, umbrella)]
    answers.append(await ask(umbrella, prompt_ids, greedy(4), public_cache="other docs"))
    answers.append(await ask(acme, prompt_ids, greedy(4)))
    assert [cached(answer) for answer in answers] == [0, NUM_CACHED, 0, 0]
    assert {answer.token_ids for answer in answers} == {wanted}


async def test_no_salt_is_taken_for_another_one(acme: AsyncClient, reference: ReferenceEngine) -> None:
    """vllm#12621, vllm#54727, confidential-model-router#386: what was joined without lengths, or cut at a NUL, shared a
    key with something else."""
    prompt_ids = random_prompt(NUM_TOKENS, 4)
    wanted = expected(reference, prompt_ids, 2)
    ways: list[dict[str, Any]] = [{}, {"public_cache": "23"}]
    ways += [{"cache_salt": salt} for salt in ("23", "3", "2\0003", "2", "2:3", "2/3", " ", "x" * 1_000, "é")]
    for way in ways:
        answer = await ask(acme, prompt_ids, greedy(2), **way)
        assert (cached(answer), answer.token_ids) == (0, wanted), f"{way} has not been asked before"
    for way in ways:
        assert cached(await ask(acme, prompt_ids, greedy(2), **way)) == NUM_CACHED, way
    with pytest.raises(InvalidRequestError, match="cache_salt is empty"):
        await ask(acme, prompt_ids, greedy(2), cache_salt="")


async def test_no_prompt_is_taken_for_one_that_reads_the_same(acme: AsyncClient, reference: ReferenceEngine) -> None:
    """vllm#12621: token ids that were written one after another read the same as others."""
    tail = random_prompt(NUM_TOKENS - 5, 5)
    beginnings = ((11, 233, 4, 5, 6), (112, 33, 4, 5, 6), (11, 23, 34, 5, 6), (11, 23, 3, 45, 6))
    for beginning in beginnings:
        prompt_ids = beginning + tail
        answer = await ask(acme, prompt_ids, greedy(2))
        assert (cached(answer), answer.token_ids) == (0, expected(reference, prompt_ids, 2))
