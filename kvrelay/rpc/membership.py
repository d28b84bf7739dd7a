"""A node's place at a coordinator: a stream to it that says how the node is and what it has cached, opened again when
it breaks."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Any

import grpc

from kvrelay.cluster import NodeInfo, NodeStatus
from kvrelay.errors import KVRelayError, UnavailableError
from kvrelay.kv.cache_feed import CacheFeed
from kvrelay.kv.named_blocks import NamedBlocks
from kvrelay.pb import cluster_pb2, cluster_pb2_grpc
from kvrelay.rpc import convert_cluster
from kvrelay.rpc.absence import Absence
from kvrelay.rpc.calls import Replies
from kvrelay.rpc.connection import Connection
from kvrelay.rpc.credentials import ChannelTLS
from kvrelay.types import InstanceId

logger = logging.getLogger(__name__)

MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0
GATHER_S = 0.05  # from the first cached block to come or go until it is told, together with those after it


class _Resync(Enum):
    ASKED = 1


_JoinCall = grpc.aio.StreamStreamCall[cluster_pb2.NodeEvent, cluster_pb2.JoinEvent]


class Membership:
    """Keeps `info` joined to the coordinator from `start` to `close`; belongs to the event loop's thread.

    `status` is read each time one is sent: every `interval_s`, and at once after `changed`. What becomes of `cached`
    blocks, if there are any, is told to a coordinator that asks. `is_wanted` is asked about each coordinator that
    accepts the node; where it says no, the node leaves it and this membership ends for good.
    """

    def __init__(
        self,
        coordinator_address: str,
        info: NodeInfo,
        status: Callable[[], NodeStatus],
        *,
        interval_s: float = 0.5,
        now: Callable[[], float] = time.monotonic,
        is_wanted: Callable[[InstanceId], bool] = lambda coordinator_id: True,
        cached: NamedBlocks | None = None,
        tls: ChannelTLS | None = None,
    ) -> None:
        self._address = coordinator_address
        self._info = info
        self._status = status
        self._interval_s = interval_s
        self._cached = cached
        self._tls = tls
        self._feed: CacheFeed | None = None
        self._status_due = False
        self._cache_due_at = math.inf  # by the loop's clock; inf while there is nothing to tell
        self._something_due = asyncio.Event()
        self._joined = asyncio.Event()
        self._left = asyncio.Event()
        self._left.set()
        self._is_wanted = is_wanted
        self._absence = Absence(coordinator_address, now)
        self._task: asyncio.Task[None] | None = None

    @property
    def joined(self) -> bool:
        """The coordinator has accepted this node and its stream lives."""
        return self._joined.is_set()

    async def wait_joined(self) -> None:
        await self._joined.wait()

    async def wait_left(self) -> None:
        """Returns when the stream is broken or not there yet."""
        await self._left.wait()

    def changed(self) -> None:
        """Sends a status now; calls before it leaves count as one."""
        self._status_due = True
        self._something_due.set()

    async def start(self) -> None:
        if self._cached is not None:
            loop = asyncio.get_running_loop()
            self._feed = self._cached.open_feed(lambda: loop.call_soon_threadsafe(self._tell_cache_in, GATHER_S))
        self._task = asyncio.create_task(self._stay_joined(), name="membership")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if self._cached is not None and self._feed is not None:
            self._cached.close_feed(self._feed)

    async def _stay_joined(self) -> None:
        backoff_s = MIN_BACKOFF_S
        connection = Connection(self._address, tls=self._tls)
        try:
            while True:
                was_accepted, error = await self._join(cluster_pb2_grpc.ClusterStub(connection.channel))
                if error is None:
                    return
                if was_accepted:
                    backoff_s = MIN_BACKOFF_S
                self._set_left(error, was_accepted)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        finally:
            await connection.close()

    async def _join(self, stub: cluster_pb2_grpc.ClusterAsyncStub) -> tuple[bool, KVRelayError | None]:
        """One stream from its start to its end: whether it was accepted, and why it ended; None: it is not wanted."""
        accepted = False
        call = stub.Join()
        reporter = asyncio.create_task(self._report(call), name="membership-report")
        reporter.add_done_callback(lambda done: _end_with(done, call))
        try:
            async with Replies(call, _what_it_says) as events:
                async for event in events:
                    if event is _Resync.ASKED:
                        self._begin_cache()
                    elif event is not None:
                        accepted = True
                        if not self._is_wanted(event):
                            return accepted, None
                        self._set_joined()
            return accepted, UnavailableError("it ended the stream")
        except KVRelayError as error:
            return accepted, error
        finally:
            reporter.cancel()
            self._joined.clear()
            self._end_cache()

    async def _report(self, call: _JoinCall) -> None:
        # A write on a call that is over raises any of these; the reader learns the reason.
        with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            await call.write(cluster_pb2.NodeEvent(joined=convert_cluster.node_info_to_pb(self._info)))
            status_due_at = 0.0
            while not call.done():
                self._something_due.clear()
                if self._status_due or status_due_at <= self._now():
                    self._status_due = False
                    await call.write(cluster_pb2.NodeEvent(status=convert_cluster.node_status_to_pb(self._status())))
                    status_due_at = self._now() + self._interval_s
                if self._cache_due_at <= self._now():
                    await self._tell_cache(call)
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(min(status_due_at, self._cache_due_at)):
                        await self._something_due.wait()

    async def _tell_cache(self, call: _JoinCall) -> None:
        """One message: a long story takes several, with statuses between them."""
        assert self._feed is not None
        self._cache_due_at = math.inf
        events = self._feed.take()
        if events is not None:
            await call.write(cluster_pb2.NodeEvent(cache=convert_cluster.cache_events_to_pb(events)))
            if self._feed.has_news:
                self._tell_cache_in(0.0)

    def _tell_cache_in(self, seconds: float) -> None:
        self._cache_due_at = min(self._cache_due_at, self._now() + seconds)
        self._something_due.set()

    def _begin_cache(self) -> None:
        if self._feed is not None:
            self._feed.begin()
            self._tell_cache_in(0.0)

    def _end_cache(self) -> None:
        self._cache_due_at = math.inf
        if self._feed is not None:
            self._feed.end()

    def _set_joined(self) -> None:
        logger.info("joined the coordinator at %s", self._address)
        self._absence.over()
        self._left.clear()
        self._joined.set()

    def _set_left(self, error: KVRelayError, was_joined: bool) -> None:
        self._left.set()
        line = self._absence.failed(error, was_joined=was_joined)
        if line is not None:
            logger.log(*line)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _what_it_says(event: cluster_pb2.JoinEvent) -> InstanceId | _Resync | None:
    """Who accepted the node, or that its cache is asked for; None of an event of a later version."""
    match event.WhichOneof("event"):
        case "accepted":
            return InstanceId(event.accepted.coordinator_instance_id)
        case "resync":
            return _Resync.ASKED
        case _:
            return None


def _end_with(reporter: asyncio.Task[None], call: Any) -> None:
    """A status that cannot be read ends the stream, so that the coordinator does not count on the node."""
    if not reporter.cancelled() and (error := reporter.exception()):
        logger.error("cannot report the node's status", exc_info=error)
        call.cancel()
