"""A role that does nothing but what process.run asks of it; run as a program by the process tests.

Its Hold method (raw, unary-stream) answers "held", then holds its call until `hold_s` is over or another call says
b"let go"; it refuses b"bad".
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from kvrelay.errors import InvalidRequestError, ModelFileError
from kvrelay.option import option
from kvrelay.role_config import RoleConfig
from kvrelay.rpc import process
from kvrelay.rpc.door import Door
from kvrelay.rpc.health import Readiness
from kvrelay.rpc.raw import raw_methods
from kvrelay.types import InstanceId, Role

SERVICE = "kvrelay.pb.Fake"


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeConfig(RoleConfig):
    hold_s: float = option(0.0, "how long Hold holds its call", unit="s")
    last_words: bool = option(False, 'a drain that is cut short ends its calls with "told" instead')
    failure: str = option("", "what goes wrong", choices=("", "model", "bug", "slow-start", "close", "slow-close"))


class FakeApp:
    service_names = (SERVICE,)

    def __init__(self, config: FakeConfig, instance_id: InstanceId, registry: CollectorRegistry) -> None:
        self._config = config
        self._running: set[asyncio.Event] = set()
        self._let_go = asyncio.Event()
        self._last_words = b"done"
        if config.last_words:
            process.LAST_WORDS_S = 2.0  # so that a busy machine comes to them

    @property
    def doors(self) -> Sequence[Door]:
        return (Door(self._config.port, self.register, self.service_names),)

    def register(self, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((raw_methods(SERVICE, unary_stream={"Hold": self.hold}),))

    async def hold(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        if request == b"bad":
            raise InvalidRequestError("bad")
        if request == b"let go":
            self._let_go.set()
            return
        ended = asyncio.Event()
        self._running.add(ended)
        try:
            yield b"held"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.hold_s):
                    await self._let_go.wait()
            yield self._last_words
        finally:
            self._running.discard(ended)
            ended.set()

    async def start(self, address: str, readiness: Readiness) -> None:
        if self._config.failure == "model":
            raise ModelFileError("model.gguf is truncated")
        if self._config.failure == "bug":
            raise ZeroDivisionError
        if self._config.failure == "slow-start":
            sys.stderr.write("STARTING\n")
            await asyncio.Event().wait()
        readiness.set(True)

    async def drain(self, deadline_s: float) -> None:
        sys.stderr.write("DRAINING\n")
        try:
            for ended in list(self._running):
                await ended.wait()
        except asyncio.CancelledError:
            if self._config.last_words:
                self._last_words = b"told"
                self._let_go.set()
            raise

    async def close(self) -> None:
        if self._config.failure == "slow-close":
            sys.stderr.write("CLOSING\n")
            await asyncio.sleep(0.5)
            atexit.register(_exit_slowly)
        sys.stderr.write("CLOSED\n")
        if self._config.failure == "close":
            raise OSError("cannot close")


def _exit_slowly() -> None:
    sys.stderr.write("EXITING\n")
    time.sleep(0.5)
    sys.stderr.write("EXITED\n")


if __name__ == "__main__":
    sys.exit(process.main(FakeConfig, Role.KVSTORE, lambda: FakeApp))
