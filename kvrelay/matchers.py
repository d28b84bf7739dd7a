"""Makes matchers beside the event loop: compiling one may take a second, and the loop has others to serve."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from kvrelay.errors import InvalidRequestError, ModelFileError, OverloadedError
from kvrelay.grammars import Grammars
from kvrelay.matcher import Matcher
from kvrelay.messages import NodeRequest
from kvrelay.structured import StructuredOutput
from kvrelay.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NUM_THREADS = 2
# Of each thread: 3,000 rules that lead from one to the next overflow the usual 8 MiB, and that ends the process. Only
# what is used of it takes memory.
STACK_BYTES = 256 * 2**20
MAX_WAITING = 64  # in the threads or waiting for one; more are turned away
COMPILE_LIMIT_S = 4.0  # of one; what is allowed by its size takes less than half of that on a slow core
WAIT_LIMIT_S = 4.0  # for a thread
RETRY_S = 1.0


class Matchers:
    """Belongs to the event loop."""

    def __init__(
        self, grammars: Grammars, *, limit_s: float = COMPILE_LIMIT_S, wait_limit_s: float = WAIT_LIMIT_S
    ) -> None:
        """One may be compiled for `limit_s`, after it has waited for a thread for `wait_limit_s` at most."""
        self._grammars = grammars
        self._limit_s = limit_s
        self._wait_limit_s = wait_limit_s
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._num_waiting = 0

    def close(self) -> None:
        """Those that wait for a thread are given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def make(self, structured: StructuredOutput, token_ids: Sequence[int] = ()) -> Matcher:
        """For an answer that has `token_ids` already.

        Raises InvalidRequestError with the reason when it cannot be compiled, or not within the limit; OverloadedError
        if others take all threads for too long, or too many wait.
        """
        if self._num_waiting >= MAX_WAITING:
            raise _overloaded()
        loop, began = asyncio.get_running_loop(), asyncio.Event()

        def run() -> Matcher:
            loop.call_soon_threadsafe(began.set)
            return self._grammars.matcher(structured, token_ids)

        self._num_waiting += 1
        with _deep_stacks():  # which may begin a thread
            compiling = self._threads.submit(run)
        made = asyncio.wrap_future(compiling)
        made.add_done_callback(self._done)
        try:
            async with asyncio.timeout(self._wait_limit_s) as limit:
                await began.wait()
                limit.reschedule(loop.time() + self._limit_s)
                return await asyncio.shield(made)
        except TimeoutError as error:
            if not began.is_set():
                raise _overloaded() from error
            raise InvalidRequestError(
                f"{structured.kind} is refused: it takes more than {self._limit_s:g} s to compile; simplify it"
            ) from error
        finally:
            compiling.cancel()  # does nothing to one that a thread has begun

    def _done(self, made: asyncio.Future[Matcher]) -> None:
        """Also of one that nobody waits for any more: a thread that works on it is no free one."""
        self._num_waiting -= 1
        if not made.cancelled():
            made.exception()  # is told to who waits, if anyone does


def make_matchers(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> Matchers | None:
    """Takes a second for a large vocabulary. None, with a warning, where no answer could say that it is complete."""
    try:
        return Matchers(Grammars(tokenizer, eos_token_ids))
    except ModelFileError as error:
        logger.warning("no answer can be held to a schema or a grammar: %s", error.message)
        return None


async def matcher_of(request: NodeRequest, matchers: Matchers | None) -> Matcher | None:
    """Of what a request's answer is held to, if it is, with the tokens it has. Raises as Matchers.make, and
    InvalidRequestError where `matchers` is None."""
    structured = request.sampling.structured
    if structured is None:
        return None
    if matchers is None:
        raise InvalidRequestError(
            f"{structured.kind} is refused: this node's model has no tokenizer with an end-of-sequence token"
        )
    return await matchers.make(structured, request.token_ids[request.num_prompt_tokens :])


@contextmanager
def _deep_stacks() -> Iterator[None]:
    """Of threads that begin in its course."""
    usual = threading.stack_size(STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(usual)


def _overloaded() -> OverloadedError:
    return OverloadedError("too many grammars and schemas are being compiled; try again later", retry_after_s=RETRY_S)
