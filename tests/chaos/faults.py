"""Does to the cluster what the plan says, and keeps account of when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM, Signals

from kvrelay.types import Role
from tests.chaos.cluster import ChaosCluster
from tests.chaos.plan import Fault, Kind, Victim
from tests.chaos.strikes import is_stopped, num_connections
from tests.support.fault_proxy import FaultProxy

SLOW_BYTES_PER_S = 2**20
EXIT_LIMIT_S = 45.0  # of a process that was told to stop: its grace is 30 s
RECOVERY_LIMIT_S = 60.0  # from the fault's end until the victim serves again; a start takes seconds on a busy machine
USED_LIMIT_S = 15.0  # until a link that is to be spoilt has a connection; a store that failed is left alone for seconds
POLL_S = 0.05
LATE_S = 2.5  # after the recovery, in which a client may still hear of it: channels reconnect within a second


@dataclass(slots=True)
class FaultRecord:
    """Moments are of time.monotonic; `recovered_at` is when the victim served again. `struck` when the fault was seen
    to concern something: a process that ended or stood still, or a link that somebody used."""

    fault: Fault
    began_at: float
    healed_at: float | None = None
    recovered_at: float | None = None
    struck: bool = False

    def overlaps(self, start: float, end: float, late_s: float = 0.0) -> bool:
        return self.began_at <= end and (self.recovered_at is None or start <= self.recovered_at + late_s)


class Saboteur:
    """Strikes in the plan's order. `complain` hears of a victim that did not exit well or come back."""

    def __init__(self, cluster: ChaosCluster, faults: Sequence[Fault], complain: Callable[[str, Fault], None]) -> None:
        self._cluster = cluster
        self._faults = faults
        self._complain = complain
        self.records: list[FaultRecord] = []

    @property
    def active(self) -> list[Fault]:
        return [record.fault for record in self.records if record.recovered_at is None]

    def excuses(self, coordinator: int, ended_at: float, accepted: bool) -> bool:
        """Whether a request to this coordinator may have failed honestly at this moment. One that was accepted outlives
        its coordinator's drain."""
        victim = Victim(Role.COORDINATOR, coordinator)
        return any(
            record.overlaps(ended_at, ended_at, LATE_S)
            for record in self.records
            if record.fault.victim == victim
            and (record.fault.kind in _BREAKING or (record.fault.kind is Kind.TERMINATE and not accepted))
        )

    async def run(self, seconds: float) -> None:
        """Strikes for so long; faults that came too late for that by waiting for their turn are left out. Returns when
        every fault is over and every victim serves again, or its time for that is."""
        started = time.monotonic()
        async with asyncio.TaskGroup() as strikes:
            for fault in self._faults:
                await asyncio.sleep(started + fault.at_s - time.monotonic())
                while any(other.victim.role is fault.victim.role for other in self.active):
                    await asyncio.sleep(POLL_S)
                if time.monotonic() - started > seconds:
                    return
                record = FaultRecord(fault, time.monotonic())
                self.records.append(record)
                strikes.create_task(self._strike(record), name=str(fault))

    async def _strike(self, record: FaultRecord) -> None:
        fault, process = record.fault, self._cluster.processes[record.fault.victim]
        match fault.kind:
            case Kind.KILL:
                await self._end(record, SIGKILL)
            case Kind.TERMINATE:
                await self._end(record, SIGTERM)
            case Kind.STOP:
                process.signal(SIGSTOP)
                await asyncio.sleep(fault.lasts_s)
                record.struck = is_stopped(process.pid)
                process.signal(SIGCONT)
            case Kind.CUT:
                await self._spoil(record, lambda proxy: proxy.cut())
            case Kind.SILENCE:
                await self._spoil(record, lambda proxy: proxy.pause())
            case Kind.SLOW:
                await self._spoil(record, lambda proxy: proxy.throttle(SLOW_BYTES_PER_S))
        record.healed_at = time.monotonic()
        if not await self._cluster.wait_whole(fault.victim, RECOVERY_LIMIT_S):
            self._complain(f"{fault.victim.name} did not serve again within {RECOVERY_LIMIT_S:.0f} s", fault)
        record.recovered_at = time.monotonic()

    async def _end(self, record: FaultRecord, signal: Signals) -> None:
        process = self._cluster.processes[record.fault.victim]
        old = process.pid if process.running else None
        process.signal(signal)
        await self._exited(record.fault)
        await self._start_again(record.fault)
        record.struck = old is not None and process.running and process.pid != old

    async def _spoil(self, record: FaultRecord, spoil: Callable[[FaultProxy], None]) -> None:
        proxy = self._cluster.proxies[record.fault.victim]
        record.struck = await self._is_used(proxy)
        record.began_at = time.monotonic()
        await asyncio.to_thread(spoil, proxy)
        await asyncio.sleep(record.fault.lasts_s)
        await asyncio.to_thread(proxy.heal)

    async def _is_used(self, proxy: FaultProxy) -> bool:
        """Waits for that, since what was restarted lately is connected to again only when somebody needs it."""
        deadline = time.monotonic() + USED_LIMIT_S
        while not (used := num_connections(proxy.port) > 0) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        return used

    async def _exited(self, fault: Fault) -> None:
        process = self._cluster.processes[fault.victim]
        deadline = time.monotonic() + EXIT_LIMIT_S
        while process.running and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        if process.running:
            self._complain(f"{fault.victim.name} did not exit within {EXIT_LIMIT_S:.0f} s", fault)
            process.signal(SIGKILL)
        code = await asyncio.to_thread(process.wait)
        if fault.kind is Kind.TERMINATE and code != 0:
            self._complain(f"{fault.victim.name} exited with {code}", fault)

    async def _start_again(self, fault: Fault) -> None:
        await asyncio.sleep(fault.lasts_s)
        process = self._cluster.processes[fault.victim]
        process.start()
        try:
            await asyncio.to_thread(process.wait_ready)
        except (RuntimeError, TimeoutError) as error:
            self._complain(f"{fault.victim.name} did not start again: {error}", fault)


_BREAKING = frozenset({Kind.KILL, Kind.STOP, Kind.CUT, Kind.SILENCE})
