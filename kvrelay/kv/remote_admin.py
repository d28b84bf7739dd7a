"""Client of a kvstore for who looks after it: what fails here is an error, unlike for a node, to which it is a miss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from kvrelay.errors import DeadlineError, UnavailableError
from kvrelay.kv.store_messages import BlockReport, BlockSelection, DeleteReply, StoreNamespace, StoreReport, WorkReport
from kvrelay.pb import kvstore_pb2, kvstore_pb2_grpc
from kvrelay.rpc import convert_kvstore
from kvrelay.rpc.calls import Replies, StreamCall, UnaryCall, answer
from kvrelay.rpc.channel import OTHER_TLS, open_channel, speaks_other_tls
from kvrelay.rpc.credentials import ChannelTLS
from kvrelay.types import BlockHash, Tier

T = TypeVar("T")

CONTROL_TIMEOUT_S = 10.0
WORK_TIMEOUT_S = 120.0  # of a delete, and between two signs of life of longer work


class StoreAdmin:
    """Speaks to the kvstore at `address` (host:port). Belongs to one event loop. Everything raises KVRelayError."""

    def __init__(self, address: str, *, timeout_s: float = CONTROL_TIMEOUT_S, tls: ChannelTLS | None = None) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._channel = open_channel(address, tls=tls)
        self._stub = kvstore_pb2_grpc.KVStoreStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def stats(self) -> StoreReport:
        call = self._stub.Stats(kvstore_pb2.StatsRequest(), timeout=self._timeout_s)
        return await self._answer(call, convert_kvstore.store_report_from_pb)

    async def find(self, namespace: StoreNamespace, hashes: Sequence[BlockHash]) -> list[Tier]:
        """Where each block is; NONE where it is not. Does not count as a use."""
        wire = convert_kvstore.store_namespace_to_pb(namespace)
        request = kvstore_pb2.MatchRequest(namespace=wire, block_hashes=hashes, each=True)
        call = self._stub.Match(request, timeout=self._timeout_s)
        return await self._answer(call, lambda reply: list(map(convert_kvstore.tier_from_pb, reply.tiers)))

    async def pin(self, namespace: StoreNamespace, hashes: Sequence[BlockHash], pin_s: float) -> int:
        """Keeps the blocks, and those before them, for `pin_s`, a week at most; 0 unpins. How many are held."""
        wire = convert_kvstore.store_namespace_to_pb(namespace)
        request = kvstore_pb2.PinRequest(namespace=wire, block_hashes=hashes, pin_s=pin_s)
        return await self._answer(self._stub.Pin(request, timeout=self._timeout_s), lambda reply: int(reply.num_blocks))

    async def delete(self, selection: BlockSelection) -> DeleteReply:
        request = convert_kvstore.delete_request_to_pb(selection)
        call = self._stub.Delete(request, timeout=WORK_TIMEOUT_S)
        return await self._answer(call, convert_kvstore.delete_reply_from_pb)

    async def list(self, tenant: str = "", model_fingerprint: str = "") -> AsyncGenerator[BlockReport, None]:
        """What is held, of one tenant or model if one is named, in no particular order."""
        request = kvstore_pb2.ListRequest(tenant=tenant, model_fingerprint=model_fingerprint)
        async for page in self._replies(self._stub.List(request), convert_kvstore.list_reply_from_pb):
            for block in page:
                yield block

    def verify(self) -> AsyncGenerator[WorkReport, None]:
        """Proves every block on disk; what fails is dropped. Close the iterator to leave it early."""
        call = self._stub.Verify(kvstore_pb2.VerifyRequest())
        return self._replies(call, convert_kvstore.work_report_from_pb)

    def compact(self) -> AsyncGenerator[WorkReport, None]:
        """Makes the file as small as what it holds. Close the iterator to leave it early."""
        call = self._stub.Compact(kvstore_pb2.CompactRequest())
        return self._replies(call, convert_kvstore.work_report_from_pb)

    async def _answer(self, call: UnaryCall, from_pb: Callable[[Any], T]) -> T:
        try:
            return await answer(call, from_pb)
        except UnavailableError as error:
            raise self._absent(error) from error
        except DeadlineError as error:
            raise DeadlineError(f"the kvstore at {self.address} did not answer in time") from error

    async def _replies(self, call: StreamCall, from_pb: Callable[[Any], T]) -> AsyncGenerator[T, None]:
        try:
            async with Replies(call, from_pb) as replies:
                while True:
                    async with asyncio.timeout(WORK_TIMEOUT_S):
                        reply = await anext(replies, None)
                    if reply is None:
                        return
                    yield reply
        except UnavailableError as error:
            raise self._absent(error) from error
        except TimeoutError as error:
            raise DeadlineError(f"nothing came from the kvstore at {self.address} for {WORK_TIMEOUT_S:g} s") from error

    def _absent(self, error: UnavailableError) -> UnavailableError:
        reason = error.message.lower()
        if "failed to connect" not in reason and "errors resolving" not in reason:
            return UnavailableError(f"kvstore {self.address}: {error.message}", retry_after_s=error.retry_after_s)
        if speaks_other_tls(reason):
            return UnavailableError(f"kvstore {self.address} {OTHER_TLS}")
        return UnavailableError(f"no kvstore answers at {self.address}; is it running, and is this its address?")
