"""Puts a coordinator together."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from prometheus_client import CollectorRegistry

from coordinator.admission import Admission
from coordinator.cluster import Cluster
from coordinator.config import CoordinatorConfig
from coordinator.front_door import FrontDoor
from coordinator.identity import Identify, identify
from coordinator.members import Members
from coordinator.metrics import CoordinatorMetrics
from coordinator.nodes import Nodes
from coordinator.service import SERVICE_NAMES, ClusterService, InferenceService
from coordinator.tenants import Salts, read_secret
from coordinator.text import Text
from kvrelay.rpc import process
from kvrelay.rpc.health import Readiness
from kvrelay.tokenizer import load_tokenizer
from kvrelay.types import InstanceId, Role


class Coordinator:
    """Ready while it has a ready prefill node and a ready decode node. Raises ModelFileError for a bad tokenizer,
    ConfigError for a secret that cannot be read.
    """

    service_names = SERVICE_NAMES

    def __init__(
        self,
        config: CoordinatorConfig,
        instance_id: InstanceId,
        registry: CollectorRegistry,
        identify: Identify = identify,
    ) -> None:
        tokenizer = load_tokenizer(config.model)
        text = Text(tokenizer, config.model_name or config.model.name.removesuffix(".gguf"))
        self._text = text
        self._readiness: Readiness | None = None
        self._nodes = Nodes()
        self._admission = Admission(config.max_queue)
        members = Members(timeout_s=config.member_timeout_s, min_vocab_size=tokenizer.vocab_size)
        self._cluster = Cluster(members, self._nodes, self._changed)
        self._metrics = CoordinatorMetrics(registry)
        self._metrics.watch_circuits(lambda: self._cluster.circuits.num_open)
        salts = Salts(read_secret(config.cluster_secret_file))
        self.door = FrontDoor(config, text, self._cluster, self._admission, self._metrics, instance_id, salts)
        self._inference = InferenceService(self.door, config.default_max_tokens, identify)
        self._membership = ClusterService(self._cluster, self.door, instance_id)

    def register(self, server: grpc.aio.Server) -> None:
        self._inference.register(server)
        self._membership.register(server)

    async def start(self, address: str, readiness: Readiness) -> None:
        self._readiness = readiness
        self._changed()

    async def drain(self, deadline_s: float) -> None:
        try:
            await self.door.drain(deadline_s)
        finally:
            self._cluster.will_end_streams()

    async def close(self) -> None:
        await self.door.drain(0.0)
        self._cluster.close()
        await self._nodes.close()
        self._text.close()

    def _changed(self) -> None:
        self._admission.changed()
        if self._readiness is not None:
            why_not = self.door.why_not_ready()
            self._readiness.set(not why_not, why_not)


def main(argv: Sequence[str] | None = None) -> int:
    return process.main(CoordinatorConfig, Role.COORDINATOR, lambda: Coordinator, argv)
