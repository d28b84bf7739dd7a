"""The engine thread: order, exceptions, failing steps, the watchdog, the end."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvrelay.engine.loop import EngineLoop
from kvrelay.errors import NotFoundError, UnavailableError
from tests.support.manual_clock import ManualClock


class Core:
    """Counts `work` down, one a step; a step says which thread it ran on."""

    def __init__(self) -> None:
        self.work = 0
        self.fail = False
        self.corrupt = False
        self.num_checks = 0
        self.gate: threading.Event | None = None
        self.entered = threading.Event()

    def has_work(self) -> bool:
        return self.work > 0

    def step(self) -> object | None:
        self.entered.set()
        if self.gate is not None:
            self.gate.wait()
        if self.fail:
            self.fail = False
            raise RuntimeError("no such kernel")
        self.work -= 1
        return ("step", self.work, threading.current_thread().name)

    def fail_all(self, error: Exception) -> object | None:
        self.work = 0
        return ("failed", str(error))

    def check_idle(self) -> None:
        self.num_checks += 1
        if self.corrupt:
            raise AssertionError("the books do not balance")


class Delivered(list[object]):
    """What was delivered, and a way to wait for so many."""

    def __init__(self) -> None:
        super().__init__()
        self._news = asyncio.Event()

    def __call__(self, output: object) -> None:
        self.append(output)
        self._news.set()

    async def wait_for(self, count: int) -> None:
        while len(self) < count:
            self._news.clear()
            await self._news.wait()


def give_work(steps: int, **attributes: object):  # type: ignore[no-untyped-def]
    def command(core: Core) -> None:
        core.work = steps
        for name, value in attributes.items():
            setattr(core, name, value)

    return command


def records_of_engine(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "kvrelay.engine.loop"]


@asynccontextmanager
async def running(core: Core | None = None, **options: object) -> AsyncIterator[tuple[EngineLoop[Core], Delivered]]:
    delivered = Delivered()
    loop: EngineLoop[Core] = EngineLoop(lambda: core or Core(), delivered, **options)  # type: ignore[arg-type]
    await loop.start()
    try:
        yield loop, delivered
    finally:
        await loop.stop()


async def test_steps_run_on_the_engine_thread_until_work_runs_out_and_then_the_books_are_checked() -> None:
    core = Core()
    async with running(core) as (loop, delivered):
        await loop.call(give_work(2))
        await delivered.wait_for(2)
        assert delivered == [("step", 1, "engine"), ("step", 0, "engine")]
        assert await loop.call(lambda core: core.num_checks) == 1


async def test_commands_run_in_order_and_give_back_results() -> None:
    seen: list[int] = []
    async with running() as (loop, _):
        futures = [loop.submit(lambda core, i=i: seen.append(i) or i * i) for i in range(20)]
        loop.post(lambda core: seen.append(99))
        assert await asyncio.gather(*futures) == [i * i for i in range(20)]
        await loop.call(lambda core: None)
    assert seen == [*range(20), 99]


async def test_an_exception_of_a_command_comes_back_and_the_thread_lives_on(caplog: pytest.LogCaptureFixture) -> None:
    def fail(core: Core) -> None:
        raise NotFoundError("no such block")

    async with running() as (loop, _):
        with pytest.raises(NotFoundError, match="no such block"):
            await loop.call(fail)
        assert not records_of_engine(caplog)
        loop.post(fail)
        assert await loop.call(lambda core: 7) == 7
    assert [record.message for record in records_of_engine(caplog)] == ["an engine command failed"]


async def test_a_cancelled_call_still_runs_and_hurts_nobody() -> None:
    core = Core()
    core.gate = threading.Event()
    async with running(core) as (loop, _):
        await loop.call(give_work(1))
        waiting = asyncio.ensure_future(loop.call(lambda core: setattr(core, "work", 0)))
        await asyncio.sleep(0)
        waiting.cancel()
        core.gate.set()
        assert await loop.call(lambda core: core.work) == 0
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_a_failing_step_fails_its_requests_and_the_thread_lives_on(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as (loop, delivered):
        await loop.call(give_work(3, fail=True))
        await delivered.wait_for(1)
        assert delivered == [("failed", "no such kernel")]
        await loop.call(give_work(1))
        await delivered.wait_for(2)
        assert not loop.stuck(0.0)
    (record,) = records_of_engine(caplog)
    assert record.message == "an engine step failed; the requests of the batch end"
    assert record.exc_info


async def test_making_the_core_may_fail() -> None:
    def make() -> Core:
        raise NotFoundError("model.gguf does not exist")

    loop: EngineLoop[Core] = EngineLoop(make, lambda output: None)
    with pytest.raises(NotFoundError, match=r"model\.gguf"):
        await loop.start()
    await loop.wait_ended()
    with pytest.raises(UnavailableError):
        await loop.call(lambda core: None)
    await loop.stop()


async def test_a_core_that_is_being_made_is_given_up_by_stop() -> None:
    entered = threading.Event()

    def make() -> Core:
        entered.set()
        while True:
            time.sleep(0.001)  # stands for a model that loads

    loop: EngineLoop[Core] = EngineLoop(make, lambda output: None)
    starting = asyncio.ensure_future(loop.start())
    await asyncio.to_thread(entered.wait)
    await loop.stop()
    with pytest.raises(UnavailableError, match="stopped while it was being made"):
        await starting


async def test_it_is_stuck_when_a_step_takes_longer_than_the_watchdog_and_not_after() -> None:
    core, clock = Core(), ManualClock(100.0)
    core.gate = threading.Event()
    async with running(core, watchdog_s=10.0, clock=clock) as (loop, delivered):
        assert not loop.stuck(clock.now + 1000)
        loop.post(give_work(1))
        await asyncio.to_thread(core.entered.wait)
        assert not loop.stuck(clock.now + 10.0)
        assert loop.stuck(clock.now + 10.5)
        assert loop.busy_s(clock.now + 10.5) == 10.5
        assert not loop.died
        core.gate.set()
        await delivered.wait_for(1)
        await loop.call(lambda core: None)
        assert await until_idle(loop, clock)


async def until_idle(loop: EngineLoop[Core], clock: ManualClock) -> bool:
    """The thread has nothing to do once it has come back to its queue, shortly after the last result."""
    while loop.stuck(clock.now + 1000):
        await asyncio.to_thread(lambda: None)
    return True


async def test_a_long_answer_is_not_stuck_while_its_steps_finish() -> None:
    core, clock = Core(), ManualClock(100.0)
    async with running(core, watchdog_s=10.0, clock=clock) as (loop, delivered):
        for _ in range(5):
            core.gate = threading.Event()
            core.entered.clear()
            loop.post(give_work(1))
            await asyncio.to_thread(core.entered.wait)
            clock.now += 9.0
            assert not loop.stuck(clock.now)
            core.gate.set()
        await delivered.wait_for(5)


async def test_a_stopped_engine_fails_what_it_had_not_come_to() -> None:
    core = Core()
    core.gate = threading.Event()
    loop: EngineLoop[Core] = EngineLoop(lambda: core, lambda output: None)
    await loop.start()
    await loop.call(give_work(1))
    await asyncio.to_thread(core.entered.wait)
    stopping = asyncio.ensure_future(loop.stop())
    await asyncio.sleep(0)
    core.gate.set()
    await stopping
    assert not loop.running
    assert loop.stuck(0.0)
    assert not loop.died
    with pytest.raises(UnavailableError, match="not running"):
        await loop.call(lambda core: None)
    loop.post(lambda core: None)
    await loop.stop()


async def test_commands_behind_a_stop_fail_as_unavailable() -> None:
    core = Core()
    core.gate = threading.Event()
    loop: EngineLoop[Core] = EngineLoop(lambda: core, lambda output: None)
    await loop.start()
    await loop.call(give_work(1))
    await asyncio.to_thread(core.entered.wait)
    loop._commands.put(None)  # the thread is told to stop; a command comes after
    late = loop.submit(lambda core: None)
    core.gate.set()
    with pytest.raises(UnavailableError, match="stopped"):
        await late
    await loop.wait_ended()


async def test_books_that_do_not_balance_end_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """Better no node than one that answers from KV of another request."""
    core = Core()
    core.corrupt = True
    loop: EngineLoop[Core] = EngineLoop(lambda: core, lambda output: None)
    await loop.start()
    loop.post(give_work(1))
    await loop.wait_ended()
    assert loop.stuck(0.0)
    assert loop.died
    assert [r.levelno for r in records_of_engine(caplog)] == [logging.ERROR]
    await loop.stop()
