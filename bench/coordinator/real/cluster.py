"""A cluster of real processes whose coordinator starts anew for each policy, while the nodes stay."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.clusters import running
from bench.coordinator.plan import Setting
from bench.coordinator.real.asking import TENANT_KEY, Asker
from kvrelay.client import AsyncClient
from tests.support.cluster import Cluster, RoleProcess

READY_S = 60.0  # until the nodes have joined a coordinator, at most
LOOK_S = 0.05
# Nothing that a client writes makes it another tenant; here the caller's word is taken for it.
TAKES_THE_WORD = (
    "import coordinator.identity as identity; from coordinator.tenants import Tenant; "
    f"tenant = lambda context: Tenant(dict(context.invocation_metadata()).get({TENANT_KEY!r}, 'default')); "
    "identity.identify = lambda context: identity.Identity(tenant(context)); "
)


class PolicyCluster(Cluster):
    """No kvstore, so that what is found cached is found where requests were sent."""

    def __post_init__(self) -> None:
        self._salts = itertools.count(1)
        super().__post_init__()

    def _coordinator(self, index: int) -> RoleProcess:
        role = super()._coordinator(index)
        role.prelude = TAKES_THE_WORD
        return role

    @property
    def num_nodes(self) -> int:
        return self.num_prefill + self.num_decode

    @asynccontextmanager
    async def serving(self, *options: str) -> AsyncIterator[Asker]:
        """Asks a coordinator that has just started with these options and knows all nodes, of whose caches nothing
        counts that came before. What it still has at the end goes with it."""
        role = self.coordinator
        if role.running:
            await asyncio.to_thread(role.kill)
        plain = self._coordinator(0).args
        role.args = [*plain, *options]
        await asyncio.to_thread(role.restart)
        async with Asker(self.address, f"run-{next(self._salts)}") as asker, AsyncClient(self.address) as client:
            async with asyncio.timeout(READY_S):
                while not await self._is_idle(client):
                    await asyncio.sleep(LOOK_S)
            yield asker

    async def _is_idle(self, client: AsyncClient) -> bool:
        """All nodes are there, and have nothing left of the coordinator before."""
        reports = (await client.status()).nodes
        ready = [report for report in reports if report.status.ready and not report.status.num_running]
        return len(ready) == self.num_nodes


@asynccontextmanager
async def policy_cluster(
    setting: Setting, num_prefill: int, num_decode: int, *, num_decode_blocks: int
) -> AsyncIterator[PolicyCluster]:
    """Raises WorkerFailedError for what a process or an answer failed of."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-policies-") as directory:
        cluster = PolicyCluster(
            *(setting.model, Path(directory)),
            dtype="bfloat16",
            num_prefill=num_prefill,
            num_decode=num_decode,
            with_store=False,
            decode_args=["--num-blocks", str(num_decode_blocks)],
        )
        async with running(cluster):
            yield cluster
