"""The cluster under attack: two processes of each role, each behind a proxy that all others and the clients go through,
so that a link can be spoilt and a new process comes back on the old address."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL

from kvrelay.client import AsyncClient
from kvrelay.cluster import ClusterStatus
from kvrelay.errors import KVRelayError
from kvrelay.types import Role
from tests.chaos.plan import Victim, victims
from tests.support.cluster import RoleProcess, free_port
from tests.support.fault_proxy import FaultProxy

NUM_BLOCKS = 512
STATUS_TIMEOUT_S = 2.0
FRESH_S = 1.2  # a member that was heard of since
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Shape:
    """`dtype` is what the nodes compute in."""

    num_coordinators: int = 2
    num_stores: int = 2
    num_prefill: int = 2
    num_decode: int = 2
    dtype: str = "float32"

    @property
    def victims(self) -> tuple[Victim, ...]:
        return victims(
            {
                Role.COORDINATOR: self.num_coordinators,
                Role.KVSTORE: self.num_stores,
                Role.PREFILL_NODE: self.num_prefill,
                Role.DECODE_NODE: self.num_decode,
            }
        )


class ChaosCluster:
    """`processes`, their `proxies` and the `addresses` where others reach them, by victim. Once open it belongs to one
    event loop."""

    def __init__(self, model: Path, directory: Path, shape: Shape) -> None:
        self.shape = shape
        self._ports = {victim: free_port() for victim in shape.victims}
        self.proxies = {victim: FaultProxy(port, frames=False) for victim, port in self._ports.items()}
        self.addresses = {victim: proxy.address for victim, proxy in self.proxies.items()}
        self.processes = {victim: self._process(model, directory, victim) for victim in shape.victims}
        self._clients: dict[Victim, AsyncClient] = {}

    @property
    def coordinators(self) -> tuple[Victim, ...]:
        return tuple(victim for victim in self.shape.victims if victim.role is Role.COORDINATOR)

    @property
    def nodes(self) -> tuple[Victim, ...]:
        """All that join coordinators."""
        return tuple(victim for victim in self.shape.victims if victim.role is not Role.COORDINATOR)

    async def open(self) -> None:
        """Starts every process and waits until each is ready."""
        for proxy in self.proxies.values():
            proxy.start()
        for process in self.processes.values():
            process.start()
        await asyncio.gather(*(asyncio.to_thread(process.wait_ready) for process in self.processes.values()))
        self._clients = {victim: AsyncClient(self.addresses[victim]) for victim in self.coordinators}

    async def close(self) -> dict[Victim, int]:
        """Drains every process, coordinators first; exit codes."""
        for client in self._clients.values():
            await client.close()
        codes: dict[Victim, int] = {}
        for group in (self.coordinators, self.nodes):
            running = [victim for victim in group if self.processes[victim].running]
            stops = (asyncio.to_thread(self.processes[victim].stop) for victim in running)
            codes.update(zip(running, await asyncio.gather(*stops), strict=True))
        return codes

    def kill(self) -> None:
        """Whatever still runs, in whatever state."""
        running = [process for process in self.processes.values() if process.running]
        for process in running:
            process.signal(SIGKILL)
        for process in running:
            process.wait()
        for proxy in self.proxies.values():
            proxy.close()

    def client(self, coordinator: Victim) -> AsyncClient:
        """A long-lived one, as clients have."""
        return self._clients[coordinator]

    async def status(self, coordinator: Victim) -> ClusterStatus | None:
        """None when it does not answer in time."""
        with contextlib.suppress(KVRelayError, TimeoutError):
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                return await self._clients[coordinator].status()
        return None

    async def wait_whole(self, victim: Victim, timeout_s: float) -> bool:
        """Whether within `timeout_s` the victim serves again: a coordinator that is ready, or a node that every
        coordinator that answers, at least one, has as a member."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not await self._is_whole(victim):
                    await asyncio.sleep(POLL_S)
                return True
        return False

    async def _is_whole(self, victim: Victim) -> bool:
        if victim.role is Role.COORDINATOR:
            status = await self.status(victim)
            return status is not None and status.ready
        told = [status for one in self.coordinators if (status := await self.status(one)) is not None]
        return bool(told) and all(has_fresh(status, self.addresses[victim]) for status in told)

    def _process(self, model: Path, directory: Path, victim: Victim) -> RoleProcess:
        args = ["--port", str(self._ports[victim]), "--advertise", self.addresses[victim]]
        match victim.role:
            case Role.COORDINATOR:
                args += ["--model", str(model), "--http-port", "-1"]
            case Role.KVSTORE:
                path = directory / victim.name
                args += ["--path", str(path), "--memory-bytes", "4MiB", "--disk-bytes", "16MiB", *self._join()]
            case _:
                store = self.addresses[Victim(Role.KVSTORE, victim.index % self.shape.num_stores)]
                args += ["--model", str(model), "--dtype", self.shape.dtype, "--threads", "1", "--kvstore", store]
                args += ["--num-blocks", str(NUM_BLOCKS), *self._join()]
        return RoleProcess(victim.role.value, args, directory / f"{victim.name}.log")

    def _join(self) -> Iterator[str]:
        yield from ("--coordinator", ",".join(self.addresses[victim] for victim in self.coordinators))


def has_fresh(status: ClusterStatus, address: str) -> bool:
    """Whether a ready member at this address was heard of lately, and no other there."""
    reports = [report for report in status.nodes if report.info.address == address]
    return len(reports) == 1 and reports[0].status.ready and reports[0].age_s < FRESH_S
