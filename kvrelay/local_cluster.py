"""The processes of one `kvrelay up`: started together, watched, drained in order."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvrelay.role_process import RoleExited, RoleProcess, RoleReady
from kvrelay.types import Role

# A later stage serves the earlier ones, so it outlives them.
_DRAIN_STAGES = ((Role.COORDINATOR,), (Role.PREFILL_NODE, Role.DECODE_NODE), (Role.KVSTORE,))
_KILL_MARGIN_S = 12.0  # beyond the grace that the roles know of: they close connections and files after it
_HURRY_S = 3.0  # to each stage after a second signal
_NUM_LOG_LINES = 12

Say = Callable[[str], None]  # prints one progress line


class Outcome(Enum):
    READY = "ready"
    STOPPED = "stopped"
    FAILED = "failed"


class _Signalled:
    """Someone asked for the end."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds: until all must be ready, between signs of life while they warm up, for running requests at the end."""

    start_s: float = 300.0
    heartbeat_s: float = 5.0
    grace_s: float = 30.0


class LocalCluster:
    """Roles are added, then `run` lives as long as they do."""

    def __init__(self, limits: Limits, say: Say) -> None:
        self._limits = limits
        self._say = say
        self._roles: dict[RoleProcess, Role] = {}
        self._models: dict[RoleProcess, str] = {}  # that prefill and decode nodes serve
        self._ready: set[RoleProcess] = set()
        self._events: asyncio.Queue[RoleReady | RoleExited | _Signalled] = asyncio.Queue()
        self._hurry = asyncio.Event()
        self._num_signals = 0

    def report(self, event: RoleReady | RoleExited) -> None:
        self._events.put_nowait(event)

    def add(self, role: Role, process: RoleProcess, model: str = "") -> None:
        """`model` is needed where nodes serve different ones."""
        self._roles[process] = role
        self._models[process] = model

    async def run(self, announce: Callable[[], None]) -> Outcome:
        """Until a signal (STOPPED) or until the cluster cannot serve (FAILED); every process has ended then.

        `announce` is called once all are ready.
        """
        with _signal_handlers(self._on_signal):
            try:
                for process in self._roles:
                    await process.start()
                outcome = await self._until_ready()
                if outcome is Outcome.READY:
                    announce()
                    outcome = await self._until_stopped()
            finally:
                await self._drain()
        return outcome

    def _on_signal(self) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            self._hurry.set()
        self._events.put_nowait(_Signalled())

    async def _until_ready(self) -> Outcome:
        deadline = time.monotonic() + self._limits.start_s
        while len(self._ready) < len(self._roles):
            if time.monotonic() >= deadline:
                self._say(f"not ready after {self._limits.start_s:g} s: {self._missing()}; see their logs")
                return Outcome.FAILED
            event = await self._next_event(min(self._limits.heartbeat_s, deadline - time.monotonic()))
            if isinstance(event, RoleReady):
                self._ready.add(event.role)
                self._say(f"{event.role.name} ready on {event.address} (pid {event.role.pid})")
            elif isinstance(event, RoleExited):
                self._tell_death(event, "before it was ready")
                return Outcome.FAILED
            elif isinstance(event, _Signalled):
                return Outcome.STOPPED
            else:
                self._say(f"... warming up: {self._missing()}")
        return Outcome.READY

    async def _next_event(self, timeout_s: float) -> RoleReady | RoleExited | _Signalled | None:
        try:
            return await asyncio.wait_for(self._events.get(), timeout_s)
        except TimeoutError:
            return None

    def _missing(self) -> str:
        return ", ".join(process.name for process in self._roles if process not in self._ready)

    async def _until_stopped(self) -> Outcome:
        while True:
            event = await self._events.get()
            if isinstance(event, _Signalled):
                return Outcome.STOPPED
            if isinstance(event, RoleExited):
                serves, model = self._can_serve(), self._models[event.role]
                unserved = f" model {model!r} has no other," if model and not self._has_another(event.role) else ""
                goes_on = f";{unserved} the others go on without it" if serves else ""
                self._tell_death(event, f"while serving{goes_on}")
                if not serves:
                    return Outcome.FAILED

    def _can_serve(self) -> bool:
        """Whether any model has a node of each kind left, and a coordinator."""
        left = {(role, self._models[process]) for process, role in self._roles.items() if process.running}
        return any(role is Role.COORDINATOR for role, _ in left) and any(
            {(Role.PREFILL_NODE, model), (Role.DECODE_NODE, model)} <= left for model in self._models.values()
        )

    def _has_another(self, lost: RoleProcess) -> bool:
        """Whether one more of its role and model runs."""
        own = (self._roles[lost], self._models[lost])
        return any((self._roles[one], self._models[one]) == own for one in self._roles if one.running)

    def _tell_death(self, event: RoleExited, when: str) -> None:
        self._say(f"{event.role.name} {_describe_exit(event.returncode)} {when}; the end of {event.role.log_path}:")
        for line in event.role.last_log_lines(_NUM_LOG_LINES):
            self._say(f"  | {line}")

    async def _drain(self) -> None:
        """Ends the stages in order, each within the grace period; a second signal cuts that short."""
        if any(process.running for process in self._roles):
            served = len(self._ready) == len(self._roles)
            doing = "draining: running requests may finish" if served else "stopping what was started"
            self._say(f"{doing} (Ctrl-C again to hurry)")
        for stage in _DRAIN_STAGES:
            processes = [process for process, role in self._roles.items() if role in stage and process.running]
            if processes:
                await self._end(processes)
        self._say("stopped")

    async def _end(self, processes: Sequence[RoleProcess]) -> None:
        for process in processes:
            process.send(signal.SIGTERM)
        ended: asyncio.Future[Any] = asyncio.gather(*(process.exited() for process in processes))
        hurry: asyncio.Future[Any] = asyncio.create_task(self._hurry.wait())
        limit_s = _HURRY_S if self._hurry.is_set() else self._limits.grace_s + _KILL_MARGIN_S
        await asyncio.wait({ended, hurry}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not ended.done() and self._hurry.is_set():
            for process in processes:
                process.send(signal.SIGTERM)  # a second one hastens a role
            await asyncio.wait({ended}, timeout=_HURRY_S)
        for process in processes:
            if process.running:
                self._say(f"{process.name} did not end in time and is killed")
                process.send(signal.SIGKILL)
        await ended


def _describe_exit(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    return f"was killed by {signal.Signals(-returncode).name}"


@contextmanager
def _signal_handlers(handler: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
