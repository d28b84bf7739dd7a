"""The processes of one `kvrelay up`: which there are, what each is told, and the ports they need."""

from __future__ import annotations

import argparse
import errno
import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrelay.errors import ConfigError
from kvrelay.locks import Locks
from kvrelay.types import Role

DEFAULT_PORT_BASE = 7400
METRICS_OFFSET = 100
CLUSTER_OFFSET = 200  # of the port that nodes join a coordinator by, where that is not the clients'
HTTP_OFFSET = 600  # of coordinators: 8000 by default
MAX_COORDINATORS = 9
MAX_PREFILL_NODES = 10
MAX_DECODE_NODES = 80
_OFFSETS = {Role.COORDINATOR: 0, Role.KVSTORE: 1, Role.PREFILL_NODE: 10, Role.DECODE_NODE: 20}


@dataclass(frozen=True, slots=True)
class PlannedRole:
    """One process to start. `model` is the name of what a prefill or decode node serves; empty where there is one
    model only."""

    role: Role
    name: str
    host: str
    port: int
    metrics_port: int
    flags: tuple[str, ...]
    model: str = ""
    http_port: int | None = None  # of a coordinator
    cluster_port: int | None = None  # of a coordinator whose nodes have a port of their own

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def ports(self) -> dict[int, str]:
        """What it listens on, and what for."""
        ports = {self.port: self.name, self.metrics_port: f"metrics of {self.name}"}
        further = {self.http_port: f"HTTP of {self.name}", self.cluster_port: f"nodes of {self.name}"}
        return ports | {port: purpose for port, purpose in further.items() if port is not None}


def check_shape(options: argparse.Namespace, num_models: int) -> None:
    """`--prefill` and `--decode` are nodes of each model. Raises ConfigError."""
    num_decode = options.decode * num_models
    for flag, count, most in (
        ("--coordinators", options.coordinators, MAX_COORDINATORS),
        ("--prefill", options.prefill, MAX_PREFILL_NODES // num_models),
        ("--decode", options.decode, MAX_DECODE_NODES // num_models),
        ("--kvstores", 1 if options.kvstores is None else options.kvstores, MAX_DECODE_NODES + 1 - num_decode),
    ):
        if not 1 <= count <= most:
            raise ConfigError(f"{flag} is {count}; allowed is [1, {most}]")
    if options.kvstores is not None and not options.kvstore:
        raise ConfigError("--kvstores asks for KV stores and --no-kvstore for none; give one of them")
    highest = 65_535 - HTTP_OFFSET - MAX_COORDINATORS
    if not 1 <= options.port_base <= highest:
        raise ConfigError(f"--port-base is {options.port_base}; allowed is [1, {highest}]")
    if not 0 < options.start_timeout_s < math.inf:
        raise ConfigError(f"--start-timeout-s is {options.start_timeout_s:g}; allowed is a number of seconds over 0")


def plan(
    options: argparse.Namespace, models: Mapping[str, Path], data_dir: Path, locks: Locks | None = None
) -> list[PlannedRole]:
    """The processes of a cluster of this shape, the coordinators first. `models` are by the name that clients ask for,
    which is empty for a single one that goes by its file's."""
    common = _flags_by_role(options, models, locks)
    roles = []
    for role, count in ((Role.COORDINATOR, options.coordinators), (Role.KVSTORE, num_kvstores(options))):
        for index in range(count):
            own = [*common[role], *_flags_of_one(role, index, data_dir)]
            roles.append(_planned(options, role, index, count, len(models), own))
    for role, num_each in ((Role.PREFILL_NODE, options.prefill), (Role.DECODE_NODE, options.decode)):
        of_each = [item for item in models.items() for _ in range(num_each)]
        for index, (name, path) in enumerate(of_each):
            own = [*_naming(name, path), *common[role]]
            model = name if len(models) > 1 else ""
            roles.append(_planned(options, role, index, len(of_each), len(models), own, model))
    return roles


def num_kvstores(options: argparse.Namespace) -> int:
    return int(options.kvstores or 1) if options.kvstore else 0


def _naming(name: str, path: Path) -> list[str]:
    return ["--model", str(path), *(["--model-name", name] if name else [])]


def _flags_of_one(role: Role, index: int, data_dir: Path) -> list[str]:
    """What no two processes of a role have in common. The first store's directory is what a single one's is."""
    if role is not Role.KVSTORE:
        return []
    return ["--path", str(data_dir / ("kvstore" if index == 0 else f"kvstore-{index + 1}"))]


def _flags_by_role(
    options: argparse.Namespace, models: Mapping[str, Path], locks: Locks | None
) -> dict[Role, list[str]]:
    """What all processes of a role have in common."""
    num_models = len(models)
    ports = [_port(options, Role.COORDINATOR, index, num_models) for index in range(options.coordinators)]
    coordinators = ",".join(f"{options.host}:{port + (CLUSTER_OFFSET if locks else 0)}" for port in ports)
    store_ports = [_port(options, Role.KVSTORE, index, num_models) for index in range(num_kvstores(options))]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = options.threads or max(1, cores // (num_models * (options.prefill + options.decode)))
    node = ["--dtype", options.dtype, "--threads", str(threads), "--coordinator", coordinators]
    node += ["--kvstore", ",".join(f"{options.host}:{port}" for port in store_ports)] if store_ports else []
    several = ["--models", ";".join(f"{name}={path}" for name, path in models.items())]
    flags = {
        Role.COORDINATOR: several if num_models > 1 else _naming(*next(iter(models.items()))),
        Role.KVSTORE: ["--coordinator", coordinators],
        Role.PREFILL_NODE: node,
        Role.DECODE_NODE: node,
    }
    return {role: [*of_role, *(locks.flags(role) if locks else [])] for role, of_role in flags.items()}


def _planned(
    options: argparse.Namespace, role: Role, index: int, count: int, num_models: int, own: list[str], model: str = ""
) -> PlannedRole:
    port = _port(options, role, index, num_models)
    flags = ["--host", options.host, "--port", str(port), "--metrics-port", str(port + METRICS_OFFSET)]
    flags += ["--grace-s", f"{options.grace_s:g}"]
    flags += ["--config", str(options.config.resolve())] if options.config else []
    name = role.value if count == 1 else f"{role.value}-{index + 1}"
    is_coordinator = role is Role.COORDINATOR
    http_port = port + HTTP_OFFSET if is_coordinator else None
    flags += [] if http_port is None else ["--http-port", str(http_port)]
    cluster_port = port + CLUSTER_OFFSET if options.secure and is_coordinator else None
    flags += [] if cluster_port is None else ["--cluster-port", str(cluster_port)]
    metrics_port = port + METRICS_OFFSET
    return PlannedRole(role, name, options.host, port, metrics_port, (*flags, *own), model, http_port, cluster_port)


def _port(options: argparse.Namespace, role: Role, index: int, num_models: int) -> int:
    if role is Role.KVSTORE and index > 0:
        return _port(options, Role.DECODE_NODE, num_models * options.decode + index - 1, num_models)
    past_kvstore = role is Role.COORDINATOR and index > 0
    return int(options.port_base) + _OFFSETS[role] + index + past_kvstore


def check_ports(roles: Sequence[PlannedRole]) -> None:
    """Raises ConfigError, naming the port and who wants it, if one cannot be listened on."""
    for role in roles:
        for port, purpose in role.ports.items():
            family = socket.AF_INET6 if ":" in role.host else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((role.host, port))
                except OSError as error:
                    raise ConfigError(
                        f"port {port} on {role.host} (for the {purpose}) cannot be used: {error.strerror}; "
                        f"{_port_advice(error)}"
                    ) from error


def _port_advice(error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return "give an address of this machine with --host"
    if error.errno == errno.EACCES:
        return "choose ports from 1024 on with --port-base N"
    return "stop what listens there, or choose other ports with --port-base N"
