"""A role as a process: from its command line over start, serving and drain to its exit code."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.metadata
import ipaddress
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Protocol, TypeVar

import grpc
import uvloop
from prometheus_client import CollectorRegistry, Counter, Gauge

from kvrelay import config as configuration
from kvrelay import log, metrics
from kvrelay.errors import ConfigError, KVRelayError
from kvrelay.role_config import RoleConfig
from kvrelay.rpc import server as rpc_server
from kvrelay.rpc.door import Door
from kvrelay.rpc.health import Readiness
from kvrelay.rpc.interceptor import OnError, OnOpen
from kvrelay.types import InstanceId, Role

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2  # the configuration, or a port that is taken

# Replies under way when all work is done. Streams that are no work (health watches, members) are cut after it.
LINGER_S = 1.0
LAST_WORDS_S = 0.2  # for calls that a drain failed when it was cut short: without it they hear gRPC's words for it
CLOSE_TIMEOUT_S = 5.0

# glibc's mallopt. Untuned, each message of 1 MiB is mapped and unmapped: 100,000 page faults a GB and half the rate.
_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES = -1, 512 * 2**20
_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES = -3, 64 * 2**20

C = TypeVar("C", bound=RoleConfig)


class App(Protocol):
    """One role's services and what they stand on."""

    @property
    def service_names(self) -> tuple[str, ...]:
        """Full gRPC names, raw services included, for health and reflection."""

    @property
    def doors(self) -> Sequence[Door]:
        """Their handlers are added before `start`. The first is the one whose address others are told."""

    async def start(self, address: str, readiness: Readiness) -> None:
        """Loads, joins, sets readiness. Calls may already arrive; `address` is how others reach this process."""

    async def drain(self, deadline_s: float) -> None:
        """Takes no new work, returns when running work is done; cancelled when `deadline_s` is over or at a second
        signal. What runs then may be failed: its callers are still told."""

    async def close(self) -> None:
        """Releases everything; also after a failed or cancelled `start`."""


MakeApp = Callable[[C, InstanceId, CollectorRegistry], App]


def main(
    config_class: type[C], role: Role, load_app: Callable[[], MakeApp[C]], argv: Sequence[str] | None = None
) -> int:
    """A role's whole command: configuration from `argv` (default: the command line) and the environment, then `run`.

    `load_app` is called between the two, to import what takes its time.
    """
    try:
        config = configuration.load(config_class, role.value, sys.argv[1:] if argv is None else argv, os.environ)
    except ConfigError as error:
        return _fail(role, error)
    return run(load_app(), config, role)


def run(make_app: MakeApp[C], config: C, role: Role) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code. A second signal hastens the drain.

    Prints "READY <role> <address>" on stdout when the role first is ready, and one line on stderr when it cannot start.
    """
    tune_malloc()
    instance_id = InstanceId(secrets.token_hex(8))
    log.setup(config.log_level, config.log_format, role.value, instance_id)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(make_app, config, role, instance_id))
    except KVRelayError as error:
        return _fail(role, error)
    return EXIT_OK


def tune_malloc() -> None:
    """Keeps the memory of large messages in the heap. Environment variables MALLOC_* win; without glibc: nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


def advertised_address(config: RoleConfig, port: int) -> str:
    """host:port to tell others, given the port that was bound."""
    host, _, named_port = config.advertise.rpartition(":")
    if host and named_port.isdigit() and (":" not in host or host.endswith("]")):
        return config.advertise
    host = config.advertise or config.host
    if host in ("0.0.0.0", "::", ""):
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _fail(role: Role, error: KVRelayError) -> int:
    sys.stderr.write(f"kvrelay {role.value}: {error.message}\n")
    return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED


async def _serve(make_app: MakeApp[C], config: C, role: Role, instance_id: InstanceId) -> None:
    registry = metrics.new_registry(role.value, instance_id, _version())
    with _signals() as signals:  # to the very end: a signal must not cut the closing short
        async with AsyncExitStack() as closing:
            app = make_app(config, instance_id, registry)
            closing.push_async_callback(_close, role.value, app.close)
            readiness = Readiness(app.service_names)
            servers, ports = _open(app.doors, config, readiness, registry)
            address = advertised_address(config, ports[0])
            if config.metrics_port >= 0:
                endpoint = metrics.serve(registry, config.host, config.metrics_port)
                closing.callback(endpoint.close)
                logger.info("metrics on http://%s:%d/metrics", config.host, endpoint.port)
            for server in servers:
                closing.push_async_callback(_close, "a server", partial(server.stop, None))
                await server.start()
            if await _until_told_to_stop(app, address, role, readiness, signals):
                await _drain(app, servers[0], readiness, config.grace_s, signals)


def _open(
    doors: Sequence[Door], config: RoleConfig, readiness: Readiness, registry: CollectorRegistry
) -> tuple[list[grpc.aio.Server], list[int]]:
    """Servers that are bound and not started, and their ports."""
    on_error, on_open = _error_counter(registry), _open_gauge(registry)
    servers, ports = [], []
    for door in doors:
        server = door.make_server(on_error, on_open)
        readiness.register(server)
        rpc_server.add_reflection(server, door.service_names)
        servers.append(server)
        ports.append(rpc_server.bind(server, config.host, door.port, door.tls))
        if door.tls is None and not _is_loopback(config.host):
            logger.warning(
                "port %d is open to other machines without TLS: what goes over it can be read and changed on its way",
                ports[-1],
            )
    return servers, ports


async def _until_told_to_stop(app: App, address: str, role: Role, readiness: Readiness, signals: _Signals) -> bool:
    """Whether the start was over by then; raises what it raised."""
    starting = asyncio.create_task(app.start(address, readiness), name="start")
    announcing = asyncio.create_task(_announce(role, address, readiness), name="announce")
    stopping = asyncio.create_task(signals.stop.wait(), name="stop")
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
        await stopping
        return starting.done()
    finally:
        for task in (starting, announcing, stopping):
            task.cancel()
        await asyncio.gather(starting, announcing, stopping, return_exceptions=True)


async def _announce(role: Role, address: str, readiness: Readiness) -> None:
    await readiness.wait_ready()
    sys.stdout.write(f"READY {role.value} {address}\n")
    sys.stdout.flush()


async def _drain(app: App, server: grpc.aio.Server, readiness: Readiness, grace_s: float, signals: _Signals) -> None:
    logger.info("draining, for %g s at most", grace_s)
    readiness.close("draining")
    if not await _unless_hastened(app.drain(grace_s), grace_s, signals):
        logger.warning("stopping before all work was done")
        await asyncio.sleep(LAST_WORDS_S)
    await _unless_hastened(server.stop(LINGER_S), LINGER_S + CLOSE_TIMEOUT_S, signals)


async def _unless_hastened(work: Awaitable[None], timeout_s: float, signals: _Signals) -> bool:
    """Whether `work` ended by itself before the time was over or a second signal came; its failure is logged."""
    working, hastened = asyncio.ensure_future(work), asyncio.ensure_future(signals.hasten.wait())
    await asyncio.wait({working, hastened}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    hastened.cancel()
    ended = working.done()
    working.cancel()
    for outcome in await asyncio.gather(working, return_exceptions=True):
        if isinstance(outcome, Exception):
            logger.error("failed while stopping", exc_info=outcome)
    return ended


async def _close(what: str, close: Callable[[], Awaitable[None]]) -> None:
    """A clean-up that fails or hangs is logged, and the others still run."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await close()
    except Exception:
        logger.exception("cannot close %s", what)


class _Signals:
    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hasten = asyncio.Event()

    def receive(self) -> None:
        (self.hasten if self.stop.is_set() else self.stop).set()


@contextmanager
def _signals() -> Iterator[_Signals]:
    """SIGTERM and SIGINT, taken until the process has ended: after the block they are ignored, since it is ending."""
    loop, signals = asyncio.get_running_loop(), _Signals()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.receive)
    try:
        yield signals
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


def _version() -> str:
    try:
        return importlib.metadata.version("kvrelay")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a checkout that is not installed


def _error_counter(registry: CollectorRegistry) -> OnError:
    counter = Counter(
        "kvrelay_rpc_errors_total", "Calls served that ended with an error.", ["method", "code"], registry=registry
    )
    return lambda method, code: counter.labels(method.rpartition("/")[2], code).inc()


def _open_gauge(registry: CollectorRegistry) -> OnOpen:
    gauge = Gauge("kvrelay_rpc_calls_open", "Calls that are being served.", ["method"], registry=registry)
    return lambda method, change: gauge.labels(method.rpartition("/")[2]).inc(change)
