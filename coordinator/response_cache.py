"""Complete answers to greedy requests, given again to who sends the same request. Off unless it has room.

The same is what is equal in every field, of the same tenant, to the same model on the same kind of node; a field of a
request that is new tomorrow is part of that without a change here. Whatever draws at random is computed each time.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from coordinator.event_log import EventLog
from coordinator.request_digest import request_digest
from coordinator.tenants import Tenant
from kvrelay.cluster import ModelInfo
from kvrelay.inference import GenerateEvent, GenerateRequest, RequestAccepted, RequestFinished, Timing
from kvrelay.types import RequestId

FIXED_BYTES = 2_048  # of an answer without any token: its log and its name
CACHE_HIT = ("x-kvrelay-cache", "hit")  # gRPC metadata and HTTP header of an answer that was not computed anew
_VERSION = "kvrelay-response-v1"


@dataclass(frozen=True, slots=True)
class _Stored:
    log: EventLog
    num_bytes: int
    ends_at: float


class ResponseCache:
    """Least recently used go first when `max_bytes` are full; none is given `ttl_s` after it was computed. `now` is a
    monotonic clock in seconds."""

    def __init__(self, max_bytes: int, ttl_s: float, now: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._now = now
        self._stored: OrderedDict[bytes, _Stored] = OrderedDict()
        self.num_bytes = 0

    def key(self, request: GenerateRequest, tenant: Tenant, model: ModelInfo) -> bytes | None:
        """32 bytes; None for what is not to be cached: what is drawn at random, what `keep_s` keeps already, and
        everything where there is no room."""
        if not self._max_bytes or not request.sampling.greedy or request.keep_s:
            return None
        digest = request_digest(_what_matters(request), tenant.name)
        return hashlib.sha256(repr((_VERSION, digest, model)).encode()).digest()

    def find(self, key: bytes) -> EventLog | None:
        stored = self._stored.get(key)
        if stored is None:
            return None
        if self._now() >= stored.ends_at:
            self._drop(key)
            return None
        self._stored.move_to_end(key)
        return stored.log

    def add(self, key: bytes, log: EventLog) -> None:
        """Keeps it where it is complete: an answer that failed, was left or was cut short by a drain is not."""
        num_bytes = log.num_bytes + FIXED_BYTES
        if not isinstance(log.end, RequestFinished) or num_bytes > self._max_bytes:
            return
        self._drop(key)
        while self.num_bytes + num_bytes > self._max_bytes:
            self._drop(next(iter(self._stored)))
        self._stored[key] = _Stored(log, num_bytes, self._now() + self._ttl_s)
        self.num_bytes += num_bytes

    def _drop(self, key: bytes) -> None:
        stored = self._stored.pop(key, None)
        if stored is not None:
            self.num_bytes -= stored.num_bytes


class CachedAnswer:
    """An answer that is there already, under the id of the request that it is given to."""

    def __init__(self, request_id: RequestId, log: EventLog, now: Callable[[], float]) -> None:
        self._request_id = request_id
        self._log = log
        self._now = now
        self._begun_at = now()

    @property
    def finished(self) -> RequestFinished:
        """Usage is the original's; time, nodes and attempts are what this took: none."""
        end = self._log.end
        assert isinstance(end, RequestFinished)
        took_s = self._now() - self._begun_at
        return RequestFinished(
            reason=end.reason,
            usage=end.usage,
            timing=Timing(first_token_s=took_s, total_s=took_s),
            stop_string=end.stop_string,
            prefix_hash=end.prefix_hash,
            from_response_cache=True,
        )

    async def events(self) -> AsyncIterator[GenerateEvent]:
        """As RunningRequest's."""
        async for event in self._log.events():
            match event:
                case RequestAccepted():
                    yield replace(event, request_id=self._request_id)
                case RequestFinished():
                    yield self.finished
                case _:
                    yield event

    def left(self) -> None:
        """Nothing runs for it."""


def _what_matters(request: GenerateRequest) -> GenerateRequest:
    """Without what says when a request runs, and how long its prompt's KV is kept; all else may change an answer."""
    return replace(
        request,
        priority=None,
        ttft_target_s=None,
        itl_target_s=None,
        best_effort=False,
        cache_ttl_s=None,
    )
