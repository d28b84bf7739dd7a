"""What others call on nodes, in our own types. Every failure is a KVRelayError; every call ends when left."""

from __future__ import annotations

import grpc

from kvrelay.limits import DecodeLimits, PrefillLimits
from kvrelay.messages import (
    HandoffTarget,
    NodeRequest,
    PrefillFinished,
    PrefillStarted,
    ReservationGranted,
)
from kvrelay.pb import cluster_pb2, cluster_pb2_grpc, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from kvrelay.rpc import convert_decode, convert_prefill
from kvrelay.rpc.answers import AnswerEvents, AnswerStream
from kvrelay.rpc.calls import Replies, answer
from kvrelay.rpc.convert_limits import (
    decode_limits_from_pb,
    decode_limits_to_pb,
    prefill_limits_from_pb,
    prefill_limits_to_pb,
)
from kvrelay.types import ReservationId

CONTROL_TIMEOUT_S = 5.0  # of calls that only change a lease, limits or a weight


class NodeClient:
    """What prefill and decode nodes answer alike."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = cluster_pb2_grpc.NodeStub(channel)

    async def set_weight(self, weight: float, timeout_s: float = CONTROL_TIMEOUT_S) -> float:
        """Gives what is in force then. Raises InvalidRequestError, changing nothing."""
        call = self._stub.SetWeight(cluster_pb2.SetWeightRequest(weight=weight), timeout=timeout_s)
        return await answer(call, lambda reply: float(reply.weight))


class PrefillClient:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = prefill_pb2_grpc.PrefillStub(channel)

    def prefill(
        self, request: NodeRequest, target: HandoffTarget | None, *, timeout_s: float | None = None
    ) -> Replies[PrefillStarted | PrefillFinished]:
        """Use as `async with client.prefill(...) as events:`; leaving it cancels the prefill and its KV stream."""
        call = self._stub.Prefill(convert_prefill.prefill_request_to_pb(request, target), timeout=timeout_s)
        return Replies(call, convert_prefill.prefill_event_from_pb)

    async def set_limits(self, limits: PrefillLimits, timeout_s: float = CONTROL_TIMEOUT_S) -> PrefillLimits:
        """From the next step on; gives what is in force then. Raises InvalidRequestError, changing nothing."""
        request = prefill_pb2.SetPrefillLimitsRequest(limits=prefill_limits_to_pb(limits))
        call = self._stub.SetLimits(request, timeout=timeout_s)
        return await answer(call, lambda reply: prefill_limits_from_pb(reply.limits))


class DecodeClient:
    """One a channel: it has the one stream on which all answers come."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = decode_pb2_grpc.DecodeStub(channel)
        self._answers = AnswerStream(self._stub.Decode)

    async def reserve(
        self,
        request: NodeRequest,
        num_tokens: int,
        timeout_s: float,
        *,
        num_tokens_now: int = 0,
        itl_target_s: float = 0.0,
    ) -> ReservationGranted:
        """Room for `num_tokens` positions, of which `num_tokens_now` are set aside at once (0: as the node's limits
        say). Prompts computed beside the answer leave it a token every `itl_target_s` (0: as the node's own target
        says). Raises OverloadedError when the node has not the blocks now, NeverFitsError when it never will."""
        wire = convert_decode.reserve_request_to_pb(request, num_tokens, num_tokens_now, itl_target_s)
        call = self._stub.Reserve(wire, timeout=timeout_s)
        return await answer(call, convert_decode.reservation_granted_from_pb)

    async def fork(
        self, reservation_id: ReservationId, index: int, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> ReservationGranted:
        """A reservation for answer `index`, at least 1, to the prompt of another one, whose blocks it shares.

        Raises NotFoundError when they are not there (any more), OverloadedError when there is no room for its own.
        """
        call = self._stub.Fork(decode_pb2.ForkRequest(reservation_id=reservation_id, index=index), timeout=timeout_s)
        return await answer(call, convert_decode.reservation_granted_from_pb)

    async def renew(self, reservation_id: ReservationId, timeout_s: float = CONTROL_TIMEOUT_S) -> float:
        """Seconds until it lapses. Raises NotFoundError when it already has."""
        call = self._stub.Renew(decode_pb2.RenewRequest(reservation_id=reservation_id), timeout=timeout_s)
        return await answer(call, lambda reply: float(reply.lease_s))

    async def release(self, reservation_id: ReservationId, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Gives a reservation back; no error when it is gone."""
        call = self._stub.Release(decode_pb2.ReleaseRequest(reservation_id=reservation_id), timeout=timeout_s)
        await answer(call, lambda reply: None)

    async def set_limits(self, limits: DecodeLimits, timeout_s: float = CONTROL_TIMEOUT_S) -> DecodeLimits:
        """From the next step on; gives what is in force then. Raises InvalidRequestError, changing nothing."""
        request = decode_pb2.SetDecodeLimitsRequest(limits=decode_limits_to_pb(limits))
        call = self._stub.SetLimits(request, timeout=timeout_s)
        return await answer(call, lambda reply: decode_limits_from_pb(reply.limits))

    def decode(
        self, reservation_id: ReservationId, compute_tail: bool = False, *, timeout_s: float | None = None
    ) -> AnswerEvents:
        """Use as `async with client.decode(...) as events:`; leaving it frees everything the request holds.

        All answers of one client come on one stream; to break it ends each of them as UnavailableError.
        """
        return self._answers.decode(reservation_id, compute_tail, timeout_s)

    def close(self) -> None:
        """The node is gone: every answer that is being read ends as UnavailableError."""
        self._answers.close()
