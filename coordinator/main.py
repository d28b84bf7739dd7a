"""Puts a coordinator together."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import grpc
from prometheus_client import CollectorRegistry

from coordinator.admission import Admission
from coordinator.cluster import Cluster
from coordinator.config import CoordinatorConfig
from coordinator.fairness import DeficitRounds
from coordinator.front_door import FrontDoor
from coordinator.identity import Identify, identify
from coordinator.members import Members
from coordinator.metrics import CoordinatorMetrics
from coordinator.nodes import Nodes
from coordinator.places import Places
from coordinator.prefix_index_metrics import PrefixIndexCollector
from coordinator.retry_advice import RetryAdvice
from coordinator.service import SERVICE_NAMES, ClusterService, InferenceService
from coordinator.tenant_policy import TenantPolicies, parse_policies
from coordinator.tenants import Salts, read_secret
from coordinator.text import Text
from kvrelay.rpc import process
from kvrelay.rpc.health import Readiness
from kvrelay.tokenizer import load_tokenizer
from kvrelay.types import DEFAULT_TENANT, InstanceId, Role

logger = logging.getLogger(__name__)

_KNOWS_NOBODY = identify


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
        members = Members(timeout_s=config.member_timeout_s, min_vocab_size=tokenizer.vocab_size)
        self._cluster = Cluster(members, self._nodes, self._changed, config.prefix_index_blocks)
        self._metrics = CoordinatorMetrics(registry)
        PrefixIndexCollector(registry, self._cluster.caches)
        policies = parse_policies(config.tenants)
        if identify is _KNOWS_NOBODY:
            _warn_of_strangers(policies)
        self._admission = _admission(config, policies, self._metrics)
        self._metrics.watch_circuits(lambda: self._cluster.circuits.num_open)
        salts = Salts(read_secret(config.cluster_secret_file))
        self.door = FrontDoor(config, text, self._cluster, self._admission, self._metrics, instance_id, salts, policies)
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


def _warn_of_strangers(policies: TenantPolicies) -> None:
    """Nobody can prove to be such a tenant, and nobody else gets the places that it is owed."""
    strangers = [name for name in policies.names if name != DEFAULT_TENANT]
    if strangers:
        logger.warning(
            "tenants names %s, but no call is authenticated yet, so all are of tenant %r: the places that these are "
            "owed stay empty",
            ", ".join(strangers),
            DEFAULT_TENANT,
        )


def _admission(config: CoordinatorConfig, policies: TenantPolicies, metrics: CoordinatorMetrics) -> Admission:
    places = Places(policies, config.max_queue, config.max_queued_tokens, metrics.queued)
    return Admission(places, DeficitRounds(policies.weight), RetryAdvice())


def main(argv: Sequence[str] | None = None) -> int:
    return process.main(CoordinatorConfig, Role.COORDINATOR, lambda: Coordinator, argv)
