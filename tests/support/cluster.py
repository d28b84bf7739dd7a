"""A real cluster for end-to-end tests: one operating-system process a role, on loopback.

Every process announces itself with one line `READY <role> <address>` on stdout; logs go to files that a failing
test shows. Coordinator and kvstore are started with torch made unimportable, which they must not need.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from prometheus_client.parser import text_string_to_metric_families

from tests.support.warm_process import WarmProcess

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 180.0  # two cores may be shared by much else
MAX_TRIED_PORTS = 2_000
STOP_TIMEOUT_S = 90.0
WITHOUT_TORCH = ("coordinator", "kvstore")
NO_TORCH = "import sys; sys.modules['torch'] = None; "

# What takes its time of a start: Python that a process runs before it forks roles.
NEEDS_OF_NODES = "import kvrelay.cli, prefill_node.main, prefill_node.app, decode_node.main, decode_node.app"
NEEDS_OF_OTHERS = {
    "coordinator": NO_TORCH + "from coordinator.command import choose_io; choose_io(); import coordinator.main",
    "kvstore": NO_TORCH + "import kvrelay.cli, kvstore.main",
}

# Of a family's samples, by its type.
_SUFFIXES = {
    "counter": ("_total", "_created"),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum", "_created"),
    "summary": ("", "_count", "_sum", "_created"),
    "unknown": ("",),
}

# A PyDLL's function does not give the interpreter up, as a long computation in an extension may not.
BUSY_ENTRY = "import ctypes, signal; signal.signal(signal.SIGUSR1, lambda *_: ctypes.PyDLL(None).usleep(8_000_000)); "


def free_port() -> int:
    """A port nobody listens on now, for a role that must come back on the same one. It is none that the system gives to
    outgoing connections, which might have it when the role starts, and none that this process or another worker of
    these tests was given for a role that is yet to start. Raises RuntimeError when none can be listened on."""
    for port in itertools.islice(_PORTS, MAX_TRIED_PORTS):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"none of {MAX_TRIED_PORTS} ports in turn can be listened on")


def _ports() -> Iterator[int]:
    """The lower ports in turn, over and over: each of pytest-xdist's workers has a part of them."""
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    own = range(first_outgoing // 2 + worker, first_outgoing, num_workers)
    start = secrets.randbelow(len(own))  # other runs on this machine are elsewhere
    return itertools.cycle((*own[start:], *own[:start]))


_PORTS = _ports()


def sum_of_samples(text: str, name: str, labels: Mapping[str, str]) -> float:
    """`text` is what a role tells Prometheus. A metric with labels has no sample before its first use, but a family."""
    families = [
        one for one in text_string_to_metric_families(text) if name.removeprefix(one.name) in _SUFFIXES[one.type]
    ]
    if not families:
        raise LookupError(f"no metric is named {name}")
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@dataclass
class RoleProcess:
    """One role as a child process."""

    role: str
    args: list[str]
    log_path: Path
    process: subprocess.Popen[bytes] | WarmProcess | None = None
    address: str = ""
    metrics_port: int = 0
    busy_signal: bool = False  # SIGUSR1 keeps its interpreter busy for 8 s
    prelude: str = ""  # Python that runs before the role is imported
    warm: bool = False  # forked with everything imported

    def start(self) -> None:
        self.metrics_port = free_port()
        entry = self.prelude + "from kvrelay.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
        if self.busy_signal:
            entry = BUSY_ENTRY + entry
        argv = [self.role, *self.args, "--metrics-port", str(self.metrics_port)]
        needs = NEEDS_OF_OTHERS.get(self.role, NEEDS_OF_NODES)
        with self.log_path.open("ab") as log:
            if self.warm and not self.prelude:
                self.process = WarmProcess(needs, entry, argv, log.fileno())
            else:
                self.process = self._fresh_process(entry, argv, log.fileno())

    def _fresh_process(self, entry: str, argv: list[str], log: int) -> subprocess.Popen[bytes]:
        if self.role in WITHOUT_TORCH:
            entry = NO_TORCH + entry
        command, environment = [sys.executable, "-c", entry, *argv], dict(os.environ, PYTHONPATH=str(ROOT))
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment, cwd=ROOT)

    def wait_ready(self) -> None:
        """Blocks until the READY line, at most START_TIMEOUT_S; shows the log when the process died instead."""
        assert self.process is not None
        assert self.process.stdout is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise TimeoutError(f"{self.role} was not ready within {START_TIMEOUT_S:.0f} s:\n{self.log()}")
            piece = os.read(self.process.stdout.fileno(), 4096)
            if not piece:
                code = self.process.wait(STOP_TIMEOUT_S)
                raise RuntimeError(f"{self.role} ended with {code} before it was ready:\n{self.log()}")
            line += piece
        word, role, address = line.decode().split()
        assert (word, role) == ("READY", self.role)
        self.address = address

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        """SIGTERM, then the exit code; a process that does not drain in time is a failure."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def restart(self) -> None:
        self.start()
        self.wait_ready()

    def wait(self) -> int:
        assert self.process is not None
        code = self.process.wait(STOP_TIMEOUT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")[-6000:] if self.log_path.exists() else ""

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of this name whose labels include these; 0 of a counter that nothing was counted in yet.
        Raises LookupError when the role has no such metric."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30) as reply:
            text = reply.read().decode()
        return sum_of_samples(text, name, labels)


@dataclass
class Cluster:
    """Coordinators, kvstore (optional), prefill and decode nodes; every node serves all the coordinators. Roles are
    forked from processes that have imported everything, unless the cluster is to be `fresh`."""

    model: Path
    directory: Path
    dtype: str = "float32"
    num_prefill: int = 1
    num_decode: int = 1
    num_coordinators: int = 1
    with_store: bool = True
    num_blocks: int = 1024
    coordinator_args: list[str] = field(default_factory=list)
    prefill_args: list[str] = field(default_factory=list)
    decode_args: list[str] = field(default_factory=list)
    store_args: list[str] = field(default_factory=list)
    busy_signal: bool = False
    fresh: bool = False  # each role imports all it needs by itself
    cluster_ports: bool = False  # nodes join by ports of their own

    def __post_init__(self) -> None:
        self.store_port = free_port()
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(self.num_coordinators)]
        self.http_ports = [free_port() for _ in range(self.num_coordinators)]
        self.joined = [f"127.0.0.1:{free_port()}" for _ in self.addresses] if self.cluster_ports else self.addresses
        self.coordinators = [self._coordinator(index) for index in range(self.num_coordinators)]
        self.prefill: list[RoleProcess] = []
        self.decode: list[RoleProcess] = []
        self.store: RoleProcess | None = None

    @property
    def address(self) -> str:
        return self.addresses[0]

    @property
    def base_url(self) -> str:
        """Of OpenAI's API at the first coordinator."""
        return f"http://127.0.0.1:{self.http_ports[0]}/v1"

    @property
    def coordinator(self) -> RoleProcess:
        return self.coordinators[0]

    @property
    def roles(self) -> list[RoleProcess]:
        return [*self.coordinators, *([self.store] if self.store else []), *self.prefill, *self.decode]

    def make_roles(self) -> None:
        """The processes that `start` starts; a test that starts them by itself calls this instead."""
        if self.with_store:
            self.store = self._store_role()
        self.prefill = [self._node("prefill-node", i, self.prefill_args) for i in range(self.num_prefill)]
        self.decode = [self._node("decode-node", i, self.decode_args) for i in range(self.num_decode)]

    def start(self) -> None:
        self.make_roles()
        for role in self.roles:
            role.start()
        for role in self.roles:
            role.wait_ready()

    def stop(self) -> dict[str, int]:
        """Drains every role that still runs, nodes first; exit codes by log name."""
        codes: dict[str, int] = {}
        store = [self.store] if self.store else []
        for together in ([*self.prefill, *self.decode], store, self.coordinators):
            ending = [role for role in together if role.running]
            for role in ending:
                role.signal(signal.SIGTERM)
            codes |= {role.log_path.stem: role.wait() for role in ending}
        return codes

    def kill(self) -> None:
        for role in self.roles:
            if role.running:
                role.signal(signal.SIGCONT)
                role.kill()

    def logs(self) -> str:
        return "\n".join(f"--- {role.log_path.stem}\n{role.log()}" for role in self.roles)

    def _role(self, role: str, index: int, args: list[str]) -> RoleProcess:
        log_path = self.directory / f"{role}-{index}.log"
        return RoleProcess(role, args, log_path, busy_signal=self.busy_signal, warm=not self.fresh)

    def _store_role(self) -> RoleProcess:
        path = self.directory / "store"
        args = ["--port", str(self.store_port), "--path", str(path), "--coordinator", ",".join(self.joined)]
        return self._role("kvstore", 0, [*args, *self.store_args])

    def _coordinator(self, index: int) -> RoleProcess:
        port, http_port = self.addresses[index].rpartition(":")[2], str(self.http_ports[index])
        args = ["--model", str(self.model), "--port", port, "--http-port", http_port]
        if self.cluster_ports:
            args += ["--cluster-port", self.joined[index].rpartition(":")[2]]
        return self._role("coordinator", index, [*args, *self.coordinator_args])

    def _node(self, role: str, index: int, extra: list[str]) -> RoleProcess:
        args = ["--model", str(self.model), "--dtype", self.dtype, "--threads", "1"]
        args += ["--num-blocks", str(self.num_blocks), "--coordinator", ",".join(self.joined)]
        if self.store is not None:
            args += ["--kvstore", f"127.0.0.1:{self.store_port}"]
        return self._role(role, index, [*args, *extra])


AnyCluster = TypeVar("AnyCluster", bound=Cluster)


@contextlib.contextmanager
def running(cluster: AnyCluster) -> Iterator[AnyCluster]:
    """Starts the cluster, and at the end drains it and demands a clean exit of all that still run."""
    try:
        cluster.start()
        yield cluster
        codes = cluster.stop()
        assert set(codes.values()) <= {0}, f"exit codes {codes}\n{cluster.logs()}"
    finally:
        cluster.kill()
