"""The gRPC face of a decode node: messages in and out, nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from decode_node.answers import Answers
from decode_node.node import DecodeNode
from decode_node.receiver import Receiver
from kvrelay.errors import DeadlineError, KVRelayError, NotFoundError, UnavailableError
from kvrelay.messages import ReservationGranted
from kvrelay.pb import decode_pb2, decode_pb2_grpc
from kvrelay.rpc import convert_decode, convert_limits
from kvrelay.rpc.node_service import NODE_SERVICE
from kvrelay.rpc.raw import KV_TRANSFER, raw_methods

SERVICE_NAMES = ("kvrelay.pb.Decode", NODE_SERVICE, KV_TRANSFER)

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """`node` is set once the model is loaded; until then every call is UNAVAILABLE."""

    def __init__(self) -> None:
        self.node: DecodeNode | None = None
        self._streams: set[Answers] = set()

    def register(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)
        server.add_generic_rpc_handlers((raw_methods(KV_TRANSFER, stream_stream={"Receive": self.receive}),))

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Context) -> decode_pb2.ReserveReply:
        granted = await self._loaded().reserve(*convert_decode.reserve_request_from_pb(request))
        return self._reply(granted, context)

    async def Fork(self, request: decode_pb2.ForkRequest, context: Context) -> decode_pb2.ReserveReply:
        reservation_id = convert_decode.reservation_id_from_pb(request.reservation_id)
        granted = await self._loaded().fork(reservation_id, request.index)
        return self._reply(granted, context)

    def _reply(self, granted: ReservationGranted, context: Context) -> decode_pb2.ReserveReply:
        """A caller that waits no longer, since this process was busy for too long, has gone elsewhere and will not
        release what it never heard of: without this the blocks would stand idle for a whole lease."""
        if context.time_remaining() == 0.0 or context.cancelled():
            error = DeadlineError(f"reservation {granted.reservation_id} came too late for its caller")
            self._loaded().end(granted.reservation_id, error)
            raise error
        return convert_decode.reservation_granted_to_pb(granted)

    async def Renew(self, request: decode_pb2.RenewRequest, context: Context) -> decode_pb2.RenewReply:
        reservation_id = convert_decode.reservation_id_from_pb(request.reservation_id)
        return decode_pb2.RenewReply(lease_s=self._loaded().renew(reservation_id))

    async def Release(self, request: decode_pb2.ReleaseRequest, context: Context) -> decode_pb2.ReleaseReply:
        reservation_id = convert_decode.reservation_id_from_pb(request.reservation_id)
        self._loaded().end(reservation_id, NotFoundError(f"reservation {reservation_id} was released"))
        return decode_pb2.ReleaseReply()

    async def Decode(
        self, requests: AsyncIterator[decode_pb2.DecodeRequest], context: Context
    ) -> AsyncIterator[decode_pb2.DecodeReply]:
        answers = Answers(self._loaded())
        self._streams.add(answers)
        reading = asyncio.create_task(_read(requests, answers))
        try:
            while (advanced := await answers.next()) is not None:
                yield convert_decode.answers_advanced_to_pb(advanced)
        finally:
            self._streams.discard(answers)
            answers.leave()
            reading.cancel()
        if reading.done():
            reading.result()  # raises what was wrong with a request

    def end_streams(self) -> None:
        """Ends every Decode stream, once what its answers ended with is told. For a node that has drained."""
        for answers in self._streams:
            answers.close()

    async def SetLimits(
        self, request: decode_pb2.SetDecodeLimitsRequest, context: Context
    ) -> decode_pb2.SetDecodeLimitsReply:
        limits = await self._loaded().set_limits(convert_limits.decode_limits_from_pb(request.limits))
        return decode_pb2.SetDecodeLimitsReply(limits=convert_limits.decode_limits_to_pb(limits))

    async def receive(self, messages: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """The raw method KVTransfer/Receive."""
        node = self._loaded()
        try:
            async with aclosing(Receiver(node).receive(messages)) as events:
                async for event in events:
                    yield convert_decode.blocks_received_to_bytes(event)
        except KVRelayError as error:
            node.metrics.handoff_refused(error.code)
            raise

    def _loaded(self) -> DecodeNode:
        if self.node is None:
            raise UnavailableError("the decode node is loading its model; try again soon")
        return self.node


async def _read(requests: AsyncIterator[decode_pb2.DecodeRequest], answers: Answers) -> None:
    """To the end of the requests, which is how the death of a caller looks too."""
    try:
        async for request in requests:
            answers.ask(convert_decode.answers_asked_from_pb(request))
    finally:
        answers.leave()
