"""A cluster whose coordinators, kvstore and nodes are reached only through fault proxies.

Requests go where there is least to do, and prompts are handed over, since faults are to hit any node and its handoffs:
what costs least differs with what each process happens to measure. A node advertises its proxy's address, so
coordinator and prefill nodes both reach it there; faults take a `pid` to tell the two links apart. Clients that are to
see a coordinator's link use `addresses`, others `direct_addresses`.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from tests.support.cluster import Cluster, RoleProcess, free_port
from tests.support.fault_proxy import FaultProxy


@dataclass
class ProxiedCluster(Cluster):
    """`proxies` by log name: `coordinator-0`, `kvstore-0`, `prefill-node-0`, `decode-node-1` and so on."""

    proxies: dict[str, FaultProxy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.coordinator_args = ["--placement", "load", *self.coordinator_args]
        super().__post_init__()
        self._closing = ExitStack()
        self.direct_addresses = self.addresses
        self.addresses = [
            self._proxy(f"coordinator-{index}", int(address.rpartition(":")[2])).address
            for index, address in enumerate(self.direct_addresses)
        ]
        self.direct_store_port = self.store_port
        if self.with_store:
            self.store_port = self._proxy("kvstore-0", self.direct_store_port).port

    def proxy(self, role: RoleProcess) -> FaultProxy:
        return self.proxies[role.log_path.stem]

    def heal(self) -> None:
        """Every link."""
        for proxy in self.proxies.values():
            proxy.heal()

    def kill(self) -> None:
        super().kill()
        self._closing.close()

    def _store_role(self) -> RoleProcess:
        store = super()._store_role()
        store.args[store.args.index("--port") + 1] = str(self.direct_store_port)
        return store

    def _node(self, role: str, index: int, extra: list[str]) -> RoleProcess:
        port = free_port()
        proxy = self._proxy(f"{role}-{index}", port)
        return super()._node(role, index, ["--port", str(port), "--advertise", proxy.address, *extra])

    def _proxy(self, name: str, upstream_port: int) -> FaultProxy:
        proxy = FaultProxy(upstream_port)
        self._closing.enter_context(proxy)
        self.proxies[name] = proxy
        return proxy
