"""The engine thread: commands in by one queue, results out by the event loop, and a watchdog's view of it.

The thread owns a core (model, pool, scheduler). Between steps it runs the commands that arrived; with no work it
sleeps on the queue. Everything it has to say reaches the event loop through `call_soon_threadsafe`, once for the
commands of a round and once for its step.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kvrelay.errors import UnavailableError

logger = logging.getLogger(__name__)


class EngineCore(Protocol):
    """What the thread drives. All methods run on the engine thread."""

    def has_work(self) -> bool:
        """Whether `step` has something to do now."""

    def step(self) -> object | None:
        """Schedules, runs, updates; what it returns is delivered, None is not."""

    def fail_all(self, error: Exception) -> object | None:
        """After `step` raised: ends every sequence of the engine, frees what they hold; delivered likewise."""

    def check_idle(self) -> None:
        """Called when work runs out; raises if the core's books do not balance."""


class _MakingCancelled(Exception):
    """Raised into the thread that makes a core nobody wants any more."""


C = TypeVar("C", bound=EngineCore)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Command(Generic[C]):
    run: Callable[[C], object]
    future: asyncio.Future[Any] | None  # None: nobody waits


@dataclass(frozen=True, slots=True)
class _Outcome:
    future: asyncio.Future[Any]
    result: object
    error: BaseException | None


class EngineLoop(Generic[C]):
    """Runs one core on one thread. All methods are the event loop's unless they say otherwise."""

    def __init__(
        self,
        make_core: Callable[[], C],
        deliver: Callable[[object], None],
        *,
        watchdog_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make_core` runs on the engine thread (it loads the model); `deliver` runs on the event loop."""
        self._make_core = make_core
        self._deliver = deliver
        self._watchdog_s = watchdog_s
        self._clock = clock
        self._commands: queue.SimpleQueue[_Command[C] | None] = queue.SimpleQueue()
        self._busy_since: float | None = None  # start of the step or command that runs now; None while idle
        self._open = False  # takes commands
        self._making = False  # the thread is inside make_core
        self._told_to_stop = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Returns when the core is made; raises what making it raised."""
        self._loop = asyncio.get_running_loop()
        self._started, self._ended = self._loop.create_future(), self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        await self._started

    def submit(self, fn: Callable[[C], T]) -> asyncio.Future[T]:
        """Has `fn` run on the engine thread between steps; its result or exception comes by the future.

        Commands run in the order of submit, call and post. Cancelling the future does not unsend the command. Raises
        UnavailableError if the engine is not running; the future does if it stops before it comes to the command.
        """
        if not self._open:
            raise UnavailableError("the engine is not running; try another node")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._commands.put(_Command(fn, future))
        return future

    async def call(self, fn: Callable[[C], T]) -> T:
        """As `submit`, and waits."""
        return await self.submit(fn)

    def post(self, fn: Callable[[C], object]) -> None:
        """As `submit`, with nobody waiting: an exception is logged; after the end it does nothing."""
        if self._open:
            self._commands.put(_Command(fn, None))

    @property
    def running(self) -> bool:
        """The thread lives and takes commands."""
        return self._open

    def stuck(self, now: float) -> bool:
        """Whether the thread has work and finished nothing for `watchdog_s`, or died; `now` is by the same clock."""
        if self._thread is not None and not self._open:
            return True
        return self.busy_s(now) > self._watchdog_s

    def busy_s(self, now: float) -> float:
        """How long the step or command that runs now has taken so far; 0 while idle."""
        busy_since = self._busy_since
        return 0.0 if busy_since is None else now - busy_since

    @property
    def died(self) -> bool:
        """Whether the thread has ended without being told to."""
        return self._ended is not None and self._ended.done() and not self._told_to_stop

    async def stop(self) -> None:
        """Ends the thread after the step it is in; commands it had not come to get UnavailableError.

        A core that is still being made is given up.
        """
        self._open = False
        self._told_to_stop = True
        self._commands.put(None)
        if self._making and self._thread is not None and self._thread.ident is not None:
            # Loading takes seconds and has no hook to stop it; it ends at the thread's next bytecode.
            thread_id = ctypes.c_ulong(self._thread.ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(_MakingCancelled))
        await self.wait_ended()

    async def wait_ended(self) -> None:
        """Returns when the thread has ended, told to or not."""
        if self._ended is not None:
            await asyncio.shield(self._ended)

    # What follows is called by `call_soon_threadsafe`.

    def _on_started(self, error: BaseException | None) -> None:
        assert self._started is not None
        self._open = error is None and self._commands.empty()  # else it was stopped meanwhile
        if self._started.done():
            return
        if error is None:
            self._started.set_result(None)
        else:
            self._started.set_exception(error)

    def _on_outcomes(self, outcomes: list[_Outcome]) -> None:
        for outcome in outcomes:
            if outcome.future.done():
                continue
            if outcome.error is None:
                outcome.future.set_result(outcome.result)
            else:
                outcome.future.set_exception(outcome.error)

    def _on_ended(self) -> None:
        assert self._ended is not None
        assert self._started is not None
        self._open = False
        if not self._started.done():
            self._started.set_exception(UnavailableError("the engine ended before it had started"))
        while not self._commands.empty():
            command = self._commands.get_nowait()
            if command is not None and command.future is not None and not command.future.done():
                command.future.set_exception(UnavailableError("the engine stopped; try another node"))
        if not self._ended.done():
            self._ended.set_result(None)

    # What follows runs on the engine thread.

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(callback, *args)

    def _run(self) -> None:
        try:
            self._drive()
        except Exception:
            logger.exception("the engine thread failed; the node takes no more work")
        finally:
            self._tell(self._on_ended)

    def _drive(self) -> None:
        try:
            self._making = True
            core = self._make_core()
            self._making = False
        except _MakingCancelled:
            self._tell(self._on_started, UnavailableError("the engine was stopped while it was being made"))
            return
        except Exception as error:  # noqa: BLE001 - told to whoever called start()
            self._making = False
            self._tell(self._on_started, error)
            return
        self._tell(self._on_started, None)
        worked = False  # since the core's books were last checked
        while True:
            if core.has_work():
                worked = True
            else:
                self._busy_since = None
                if worked:
                    core.check_idle()
                worked = False
            if not self._run_commands(core):
                return
            if core.has_work():
                self._busy_since = self._clock()
                self._step(core)
                worked = True

    def _run_commands(self, core: C) -> bool:
        """Runs the commands that are there, waiting for one if there is no work; False when told to stop."""
        outcomes: list[_Outcome] = []
        num_waiting = self._commands.qsize() if core.has_work() else max(1, self._commands.qsize())
        try:
            for _ in range(num_waiting):
                command = self._commands.get()
                self._busy_since = self._clock()
                if command is None:
                    return False
                self._run_command(core, command, outcomes)
            return True
        finally:
            if outcomes:
                self._tell(self._on_outcomes, outcomes)

    def _run_command(self, core: C, command: _Command[C], outcomes: list[_Outcome]) -> None:
        try:
            result, error = command.run(core), None
        except Exception as raised:
            result, error = None, raised
            if command.future is None:
                logger.exception("an engine command failed")
        if command.future is not None:
            outcomes.append(_Outcome(command.future, result, error))

    def _step(self, core: C) -> None:
        try:
            output = core.step()
        except Exception as error:
            logger.exception("an engine step failed; the requests of the batch end")
            output = core.fail_all(error)
        if output is not None:
            self._tell(self._deliver, output)
