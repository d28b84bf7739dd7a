"""`kvrelay up`: a whole cluster on this machine, one process per role, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import errno
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrelay import config
from kvrelay.config_table import config_class
from kvrelay.demo_model import cache_directory, fetch
from kvrelay.errors import ConfigError
from kvrelay.local_cluster import Limits, LocalCluster, Outcome, Say
from kvrelay.role_process import RoleProcess
from kvrelay.types import Role

DEFAULT_PORT_BASE = 7400
METRICS_OFFSET = 100
MAX_COORDINATORS = 9
MAX_PREFILL_NODES = 10
MAX_DECODE_NODES = 80
_OFFSETS = {Role.COORDINATOR: 0, Role.KVSTORE: 1, Role.PREFILL_NODE: 10, Role.DECODE_NODE: 20}


@dataclass(frozen=True, slots=True)
class PlannedRole:
    """One process to start."""

    role: Role
    name: str
    host: str
    port: int
    metrics_port: int
    flags: tuple[str, ...]

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--coordinators", type=int, default=1, metavar="N", help="coordinators (default: 1)")
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill nodes (default: 1)")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="decode nodes (default: 1)")
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="GGUF file or Hugging Face directory (default: the demo model)"
    )
    parser.add_argument("--model-name", default="", metavar="NAME", help="name clients ask for (default: the file's)")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="(default: bfloat16)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port-base",
        type=int,
        default=DEFAULT_PORT_BASE,
        metavar="N",
        help="the coordinator's port; kvstore +1, further coordinators +2.., prefill nodes +10.., decode nodes +20.., "
        "further kvstores after them, metrics of each +100 "
        f"(default: {DEFAULT_PORT_BASE})",
    )
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="threads of each node (default: its share of the cores)"
    )
    parser.add_argument("--kvstore", action=argparse.BooleanOptionalAction, default=True, help="run a KV store")
    parser.add_argument("--kvstores", type=int, metavar="N", help="how many KV stores (default: 1)")
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="logs and the store's disk tier (default: a cache directory)"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with more settings, given to each role")
    parser.add_argument(
        "--grace-s", type=float, default=30.0, metavar="S", help="time running requests get at the end (default: 30)"
    )
    parser.add_argument(
        "--start-timeout-s", type=float, default=300.0, metavar="S", help="time the roles get to start (default: 300)"
    )


def run(options: argparse.Namespace, *, command: Sequence[str] = (sys.executable, "-m", "kvrelay.cli")) -> int:
    """Starts the cluster and stays until a signal; the exit status. `command` starts a role named by its next argument.

    Raises KVRelayError when something is wrong before the first process starts.
    """
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {line}", flush=True)

    check_shape(options)
    data_dir: Path = options.data_dir or cache_directory() / f"up-{options.port_base}"
    draft = plan(options, Path(), data_dir)
    check_settings(draft)
    check_ports(draft)
    model = find_model(options.model, say)
    roles = plan(options, model, data_dir)
    try:
        (data_dir / "logs").mkdir(parents=True, exist_ok=True)
        cluster = _make_cluster(options, roles, command, data_dir, say)
    except OSError as error:
        raise ConfigError(f"cannot write to {data_dir}: {error.strerror}; choose another with --data-dir") from error
    say(f"starting {', '.join(role.name for role in roles)} with {model.name} in {options.dtype}")
    outcome = asyncio.run(cluster.run(lambda: print(_how_to_use(roles, data_dir), flush=True)))
    return 1 if outcome is Outcome.FAILED else 0


def check_shape(options: argparse.Namespace) -> None:
    for flag, count, most in (
        ("--coordinators", options.coordinators, MAX_COORDINATORS),
        ("--prefill", options.prefill, MAX_PREFILL_NODES),
        ("--decode", options.decode, MAX_DECODE_NODES),
        ("--kvstores", 1 if options.kvstores is None else options.kvstores, MAX_DECODE_NODES + 1 - options.decode),
    ):
        if not 1 <= count <= most:
            raise ConfigError(f"{flag} is {count}; allowed is [1, {most}]")
    if options.kvstores is not None and not options.kvstore:
        raise ConfigError("--kvstores asks for KV stores and --no-kvstore for none; give one of them")
    highest = 65_535 - 2 * METRICS_OFFSET
    if not 1 <= options.port_base <= highest:
        raise ConfigError(f"--port-base is {options.port_base}; allowed is [1, {highest}]")
    if not 0 < options.start_timeout_s < math.inf:
        raise ConfigError(f"--start-timeout-s is {options.start_timeout_s:g}; allowed is a number of seconds over 0")


def check_settings(roles: Sequence[PlannedRole]) -> None:
    """Reads every role's configuration as the role will. Raises ConfigError for what would end it at once."""
    for role in roles:
        config.load(config_class(role.role), role.role.value, role.flags, os.environ).check()


def find_model(path: Path | None, say: Say) -> Path:
    if path is None:
        return fetch(say=say)
    if not path.exists():
        raise ConfigError(f"--model {path} does not exist; give a GGUF file or a Hugging Face directory")
    return path.resolve()


def plan(options: argparse.Namespace, model: Path, data_dir: Path) -> list[PlannedRole]:
    """The processes of a cluster of this shape, the coordinators first."""
    counts = {
        Role.COORDINATOR: options.coordinators,
        Role.KVSTORE: _num_kvstores(options),
        Role.PREFILL_NODE: options.prefill,
        Role.DECODE_NODE: options.decode,
    }
    own_flags = _flags_by_role(options, model)
    return [
        _planned(options, role, index, count, [*own_flags[role], *_flags_of_one(role, index, data_dir)])
        for role, count in counts.items()
        for index in range(count)
    ]


def _num_kvstores(options: argparse.Namespace) -> int:
    return int(options.kvstores or 1) if options.kvstore else 0


def _flags_of_one(role: Role, index: int, data_dir: Path) -> list[str]:
    """What no two processes of a role have in common. The first store's directory is what a single one's is."""
    if role is not Role.KVSTORE:
        return []
    return ["--path", str(data_dir / ("kvstore" if index == 0 else f"kvstore-{index + 1}"))]


def _flags_by_role(options: argparse.Namespace, model: Path) -> dict[Role, list[str]]:
    ports = [_port(options, Role.COORDINATOR, index) for index in range(options.coordinators)]
    coordinators = ",".join(f"{options.host}:{port}" for port in ports)
    kvstores = [f"{options.host}:{_port(options, Role.KVSTORE, index)}" for index in range(_num_kvstores(options))]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = options.threads or max(1, cores // (options.prefill + options.decode))
    naming = ["--model", str(model), *(["--model-name", options.model_name] if options.model_name else [])]
    node = [*naming, "--dtype", options.dtype, "--threads", str(threads), "--coordinator", coordinators]
    node += ["--kvstore", ",".join(kvstores)] if kvstores else []
    return {
        Role.COORDINATOR: naming,
        Role.KVSTORE: ["--coordinator", coordinators],
        Role.PREFILL_NODE: node,
        Role.DECODE_NODE: node,
    }


def _planned(options: argparse.Namespace, role: Role, index: int, count: int, own: list[str]) -> PlannedRole:
    port = _port(options, role, index)
    flags = ["--host", options.host, "--port", str(port), "--metrics-port", str(port + METRICS_OFFSET)]
    flags += ["--grace-s", f"{options.grace_s:g}"]
    flags += ["--config", str(options.config.resolve())] if options.config else []
    name = role.value if count == 1 else f"{role.value}-{index + 1}"
    return PlannedRole(role, name, options.host, port, port + METRICS_OFFSET, (*flags, *own))


def _port(options: argparse.Namespace, role: Role, index: int) -> int:
    if role is Role.KVSTORE and index > 0:
        return _port(options, Role.DECODE_NODE, options.decode + index - 1)
    past_kvstore = role is Role.COORDINATOR and index > 0
    return int(options.port_base) + _OFFSETS[role] + index + past_kvstore


def check_ports(roles: Sequence[PlannedRole]) -> None:
    """Raises ConfigError, naming the port and who wants it, if one cannot be listened on."""
    for role in roles:
        for port, purpose in ((role.port, role.name), (role.metrics_port, f"metrics of {role.name}")):
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


def _make_cluster(
    options: argparse.Namespace, roles: Sequence[PlannedRole], command: Sequence[str], data_dir: Path, say: Say
) -> LocalCluster:
    limits = Limits(start_s=options.start_timeout_s, grace_s=options.grace_s)
    cluster = LocalCluster(limits, say)
    for role in roles:
        log_path = data_dir / "logs" / f"{role.name}.log"
        log_path.write_bytes(b"")
        cluster.add(
            role.role, RoleProcess(role.name, [*command, role.role.value, *role.flags], log_path, cluster.report)
        )
    return cluster


def _how_to_use(roles: Sequence[PlannedRole], data_dir: Path) -> str:
    """What a newcomer needs now: addresses, and three calls that work as they are written."""
    coordinator = roles[0]
    program = _program()
    where = "" if coordinator.address == f"127.0.0.1:{DEFAULT_PORT_BASE}" else f" --address {coordinator.address}"
    rows = [
        f"  {role.name:15} {role.address:21} metrics http://{role.host}:{role.metrics_port}/metrics" for role in roles
    ]
    calls = [
        f'  {program} ask{where} --temperature 0 "What is the capital of France?"',
        f"  {program} status{where}",
        f'  {program} ask{where} --json --temperature 0 --max-tokens 16 --raw "1, 2, 3,"',
    ]
    logs = f"logs in {data_dir / 'logs'}; Ctrl-C drains and stops"
    note = []
    if roles[1].role is Role.COORDINATOR:
        note = ["", "A request's id belongs to the coordinator it was sent to: cancel it there, by --address."]
    return "\n".join(["", "kvrelay is up.", *rows, "", "Try, in another terminal:", *calls, *note, "", logs, ""])


def _program() -> str:
    """How to call this command from the same directory."""
    if shutil.which("kvrelay"):
        return "kvrelay"
    called = Path(sys.argv[0])
    return os.path.relpath(called) if called.name == "kvrelay" else f"{sys.executable} -m kvrelay.cli"
