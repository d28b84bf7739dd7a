"""Puts a coordinator together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry

from coordinator.admission import Admission
from coordinator.auth import make_authenticator
from coordinator.cluster import Cluster
from coordinator.config import CoordinatorConfig
from coordinator.doors import guard_of_clients, limits_of_clients
from coordinator.fairness import DeficitRounds
from coordinator.front_door import FrontDoor
from coordinator.http.app import make_app
from coordinator.http.server import HttpServer
from coordinator.identity import Identify, identify
from coordinator.members import COMPUTING_ROLES, Members
from coordinator.metrics import CoordinatorMetrics
from coordinator.nodes import Nodes
from coordinator.places import Places
from coordinator.policy_metrics import PolicyMetrics
from coordinator.prediction_metrics import PredictionMetrics
from coordinator.prefix_index_metrics import PrefixIndexCollector
from coordinator.retry_advice import RetryAdvice
from coordinator.served_models import ServedModel, ServedModels
from coordinator.service import CLUSTER_SERVICE, SERVICE_NAMES, ClusterService, InferenceService
from coordinator.tenant_metrics import TenantMetrics
from coordinator.tenant_policy import TenantPolicies, parse_policies
from coordinator.tenants import Salts, read_secret
from coordinator.terms import Terms
from coordinator.text import LongTexts, Text
from coordinator.vllm_engine.service import SERVICE_NAME as VLLM_ENGINE
from coordinator.vllm_engine.service import VllmEngineService
from kvrelay.matchers import Matchers, make_matchers
from kvrelay.rpc import process
from kvrelay.rpc.credentials import DoorTLS, peer_tls
from kvrelay.rpc.door import Door
from kvrelay.rpc.health import Readiness
from kvrelay.tokenizer import Tokenizer, load_tokenizer
from kvrelay.types import DEFAULT_TENANT, InstanceId, Role

logger = logging.getLogger(__name__)

_KNOWS_NOBODY = identify


class Coordinator:
    """Ready while some model has a ready prefill node and a ready decode node.

    Raises ModelFileError for a bad tokenizer, ConfigError for settings that contradict each other or a secret that
    cannot be read.
    """

    service_names = (*SERVICE_NAMES, VLLM_ENGINE)

    def __init__(
        self,
        config: CoordinatorConfig,
        instance_id: InstanceId,
        registry: CollectorRegistry,
        identify: Identify = identify,
    ) -> None:
        config.check()
        self._config = config
        self.authenticator = make_authenticator(config)
        self._door_tls = DoorTLS(Path(config.tls_cert), Path(config.tls_key)) if config.tls_cert else None
        self._readiness: Readiness | None = None
        self._http: HttpServer | None = None
        self.peer_tls = peer_tls(config)
        self._nodes = Nodes(self.peer_tls)
        self._metrics = CoordinatorMetrics(registry)
        self._tenant_metrics, self._prediction_metrics = TenantMetrics(registry), PredictionMetrics(registry)
        self._long_texts = LongTexts()
        self._matchers: list[Matchers] = []
        policies = parse_policies(config.tenants)
        if identify is _KNOWS_NOBODY and not self.authenticator.knows_callers:
            _warn_of_strangers(policies)
        models = [self._serve(name, path, config, policies) for name, path in config.model_paths().items()]
        stores = Cluster(Members(timeout_s=config.member_timeout_s), self._nodes, _no_news)
        self._models = ServedModels(models, stores)
        PrefixIndexCollector(registry, [model.cluster.caches for model in self._models])
        self._metrics.watch_circuits(lambda: sum(model.cluster.circuits.num_open for model in self._models))
        salts = Salts(read_secret(config.cluster_secret_file))
        terms = Terms(config, policies, PolicyMetrics(registry, self._tenant_metrics.label))
        self.door = FrontDoor(config, self._models, self._metrics, instance_id, salts, policies, terms)
        self._inference = InferenceService(self.door, config.default_max_tokens, identify)
        self._vllm_engine = VllmEngineService(self.door, identify, config.model_paths())
        self._membership = ClusterService(self.door, instance_id)

    @property
    def doors(self) -> Sequence[Door]:
        port, cluster_port = self._config.port, self._config.cluster_port
        guard = guard_of_clients(self.authenticator, nodes_join_here=cluster_port < 0)
        clients = Door(port, self.register, self.service_names, guard, self._door_tls, limits_of_clients)
        nodes = Door(cluster_port, self._membership.register, (CLUSTER_SERVICE,), tls=self.peer_tls)
        return (clients,) if cluster_port < 0 else (clients, nodes)

    def register(self, server: grpc.aio.Server) -> None:
        self._inference.register(server)
        self._vllm_engine.register(server)
        self._membership.register(server)

    async def start(self, address: str, readiness: Readiness) -> None:
        self._readiness = readiness
        if self._config.http_port >= 0:
            self._http = HttpServer(
                make_app(self.door, readiness, self.authenticator), self._door_tls.of_http() if self._door_tls else None
            )
            self._http.start(self._config.host, self._config.http_port)
        for model in self._models:
            self._changed(model.name)

    async def drain(self, deadline_s: float) -> None:
        try:
            await self.door.drain(deadline_s)
        finally:
            for cluster in self._models.clusters:
                cluster.will_end_streams()

    @property
    def http_port(self) -> int | None:
        """Where the HTTP door is, once started; None without one."""
        return None if self._http is None else self._http.port

    async def close(self) -> None:
        await self.door.close()
        if self._http is not None:
            await self._http.close()
        for cluster in self._models.clusters:
            cluster.close()
        await self._nodes.close()
        self._long_texts.close()
        for matchers in self._matchers:
            matchers.close()

    def _serve(self, name: str, path: Path, config: CoordinatorConfig, policies: TenantPolicies) -> ServedModel:
        tokenizer = load_tokenizer(path)
        members = Members(
            timeout_s=config.member_timeout_s,
            min_vocab_size=tokenizer.vocab_size,
            uses_rates=config.placement == "cost",
        )
        cluster = Cluster(members, self._nodes, partial(self._changed, name), config.prefix_index_blocks)
        cluster.calibration.on_came = self._prediction_metrics.came
        return ServedModel(
            name,
            Text(tokenizer, self._long_texts, self._make_matchers(tokenizer)),
            cluster,
            _admission(config, policies, self._tenant_metrics),
        )

    def _make_matchers(self, tokenizer: Tokenizer) -> Matchers | None:
        matchers = make_matchers(tokenizer, tokenizer.eos_token_ids)
        if matchers is not None:
            self._matchers.append(matchers)
        return matchers

    def _changed(self, name: str) -> None:
        """Of that model there may be more room, or fewer nodes."""
        model = self._models.find(name)
        model.admission.changed()
        for role in COMPUTING_ROLES:
            self._metrics.usable_nodes(name, role, model.cluster.members.num_usable(role))
        if self._readiness is not None:
            why_not = self.door.why_not_ready()
            self._readiness.set(not why_not, why_not)


def _no_news() -> None:
    """Nothing waits for a kvstore."""


def _warn_of_strangers(policies: TenantPolicies) -> None:
    """Nobody can prove to be such a tenant, and nobody else gets the places that it is owed."""
    strangers = [name for name in policies.names if name != DEFAULT_TENANT]
    if strangers:
        logger.warning(
            "tenants names %s, but no call is authenticated, so all are of tenant %r: the places that these are owed "
            "stay empty; api_keys_file or jwks_file would tell them apart",
            ", ".join(strangers),
            DEFAULT_TENANT,
        )


def _admission(config: CoordinatorConfig, policies: TenantPolicies, metrics: TenantMetrics) -> Admission:
    places = Places(policies, config.max_queue, config.max_queued_tokens, metrics.queued)
    return Admission(places, DeficitRounds(policies.weight), RetryAdvice())


def main(argv: Sequence[str] | None = None) -> int:
    return process.main(CoordinatorConfig, Role.COORDINATOR, lambda: Coordinator, argv)
