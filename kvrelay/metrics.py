"""What every role's Prometheus metrics share: registry, buckets, the HTTP endpoint.

Each role declares its own in `<role>/metrics.py`, in a class that takes the registry.
"""

from __future__ import annotations

import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Info, ProcessCollector, disable_created_metrics, start_http_server

from kvrelay.errors import ConfigError

# Upper bounds in seconds: of whole requests and first tokens, of single steps and tokens.
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)


def new_registry(role: str = "", instance_id: str = "", version: str = "") -> CollectorRegistry:
    """A registry of the process's own: its memory, CPU time and open files, and who it is.

    From then on no metric of the process has a `_created` series: they double what is scraped and tell nothing that
    the start of the process does not.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # upstream
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    info = Info("kvrelay_build", "Which process this is.", registry=registry)
    info.info({"role": role, "instance": instance_id, "version": version})
    return registry


class MetricsServer:
    """Answers GET /metrics from a thread of its own until closed."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread
        self.port = int(server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(registry: CollectorRegistry, host: str, port: int) -> MetricsServer:
    """Starts the endpoint; port 0 takes any free one. Raises ConfigError when the port is not to be had."""
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(
            f"metrics port {port} on {host} cannot be opened ({error.strerror}); choose another with --metrics-port"
        ) from error
    return MetricsServer(server, thread)
