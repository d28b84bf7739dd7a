"""How far one job is, as the event loop knows it: the engine's news come in, the job's own coroutine waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kvrelay.errors import KVRelayError
from kvrelay.sampling import GeneratedToken
from kvrelay.types import BlockId
from prefill_node.engine import Admitted, Computed, Failed, JobEvent

T = TypeVar("T")


class Progress:
    """State of one job. Only its own coroutines wait on it; they see every state that is final, not each step."""

    def __init__(self) -> None:
        self.block_ids: tuple[BlockId, ...] = ()  # set once the job is admitted
        self.num_cached_blocks = 0  # of block_ids, found in the pool
        self.num_computed_tokens = 0  # positions whose KV is final and may be sent, computed here or not
        self.first_token: GeneratedToken | None = None
        self.finished_at = 0.0  # when first_token came
        self.error: KVRelayError | None = None
        self._changed = asyncio.Event()

    def take(self, event: JobEvent, now: float) -> None:
        """Takes the engine's news."""
        match event:
            case Admitted():
                self.block_ids, self.num_cached_blocks = event.block_ids, event.num_cached_blocks
            case Computed():
                self.num_computed_tokens = event.num_tokens
                if event.token is not None:
                    self.first_token, self.finished_at = event.token, now
            case Failed():
                self.fail(event.error)
        self.notify()

    def found(self, num_tokens: int) -> None:
        """KV of the first `num_tokens` positions is in the job's blocks, before the engine does anything."""
        self.num_computed_tokens = num_tokens
        self.notify()

    def fail(self, error: KVRelayError) -> None:
        """Ends every wait with `error`; the first error stays."""
        self.error = self.error or error
        self.notify()

    def notify(self) -> None:
        """Lets waiters look again, also at state of their own that changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_until(self, ready: Callable[[], bool]) -> None:
        """Returns when `ready()`; raises the job's error if it has one."""
        while True:
            if self.error is not None:
                raise self.error
            if ready():
                return
            await self._changed.wait()

    async def outcome(self, future: asyncio.Future[T]) -> T:
        """The future's; raises the job's error as soon as there is one, whether or not the future is ever done."""
        future.add_done_callback(lambda _: self.notify())
        try:
            await self.wait_until(future.done)
            return future.result()
        finally:
            future.cancel()

    async def admitted(self) -> None:
        await self.wait_until(lambda: bool(self.block_ids))

    async def finished(self) -> GeneratedToken:
        """The first token, once the whole prompt is computed."""
        await self.wait_until(lambda: self.first_token is not None)
        assert self.first_token is not None
        return self.first_token
