"""The gRPC door against whatever can be sent to it: no crash, no hang, no fault of ours, and memory stays bounded."""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.cluster import NodeInfo
from kvrelay.errors import DeadlineError, KVRelayError
from kvrelay.pb import cluster_pb2, inference_pb2
from kvrelay.rpc import convert_cluster
from kvrelay.rpc.channel import error_from_rpc
from kvrelay.types import InstanceId, Role
from tests.support.coordinator_ends import TIMEOUT_S, Ends, ends, greedy
from tests.support.fake_nodes import MODEL
from tests.support.made_up_messages import messages

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"],
    cluster_pb2.DESCRIPTOR.services_by_name["Cluster"],
)
METHODS = {f"/{service.full_name}/{method.name}": method for service in SERVICES for method in service.methods}
OUR_FAULTS = (KVRelayError.code, DeadlineError.code)
STREAMS = frozenset(name for name, method in METHODS.items() if method.client_streaming)
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_EVENTS = 5  # read of an answer before it is left
MAX_GROWTH_BYTES = 100 * 2**20
SAME_EACH_TIME = settings(
    derandomize=True, deadline=None, max_examples=60, suppress_health_check=list(HealthCheck), database=None
)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@dataclass(slots=True)
class Target:
    """A live coordinator on an event loop in a thread of its own: hypothesis calls from the test's."""

    loop: asyncio.AbstractEventLoop
    cluster: Ends

    def send(self, method: str, *requests: bytes) -> str:
        """The code of the error that it ends with, if any: gRPC's own for a broken stream are no fault of ours."""
        return asyncio.run_coroutine_threadsafe(self._send(method, requests), self.loop).result(TIMEOUT_S)

    async def _send(self, method: str, requests: tuple[bytes, ...]) -> str:
        async with grpc.aio.insecure_channel(self.cluster.address) as channel:
            call = channel.stream_stream(method)(iter(requests), timeout=TIMEOUT_S / 2)
            try:
                for _ in range(MAX_EVENTS):
                    if await call.read() is grpc.aio.EOF:
                        return ""
            except grpc.aio.AioRpcError as error:
                return error_from_rpc(error).code
            finally:
                call.cancel()
            return ""

    def still_answers(self) -> bool:
        asking = self.cluster.ask(sampling=greedy(max_tokens=2))
        return len(asyncio.run_coroutine_threadsafe(asking, self.loop).result(TIMEOUT_S).token_ids) == 2


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """At the end everything must be idle."""
    loop, ready, over = asyncio.new_event_loop(), Future[Target](), asyncio.Event()

    async def host() -> None:
        async with ends() as cluster:
            ready.set_result(Target(loop, cluster))
            await over.wait()

    hosting = threading.Thread(target=lambda: loop.run_until_complete(host()), daemon=True)
    hosting.start()
    one = ready.result(TIMEOUT_S)
    assert one.still_answers()
    before = resident_bytes()
    yield one
    assert one.still_answers()
    assert resident_bytes() - before < MAX_GROWTH_BYTES
    loop.call_soon_threadsafe(over.set)
    hosting.join(TIMEOUT_S)
    assert not hosting.is_alive()
    loop.close()


@SAME_EACH_TIME
@given(method=st.sampled_from(sorted(METHODS)), parts=st.lists(st.binary(max_size=200), min_size=1, max_size=3))
def test_bytes_that_are_nothing(target: Target, method: str, parts: list[bytes]) -> None:
    assert target.send(method, *(parts if method in STREAMS else parts[:1])) not in OUR_FAULTS


@SAME_EACH_TIME
@given(sent=st.binary(max_size=300), greets=st.booleans())
def test_bytes_that_are_no_http2(target: Target, sent: bytes, greets: bool) -> None:
    """With its preface and without; how the server ends the connection is its own affair."""
    port = int(target.cluster.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        connection.sendall((HTTP2_PREFACE if greets else b"") + sent)


@SAME_EACH_TIME
@given(data=st.data(), method=st.sampled_from(sorted(METHODS)))
def test_messages_whose_fields_hold_anything(target: Target, data: st.DataObject, method: str) -> None:
    request = data.draw(messages(METHODS[method].input_type))
    assert target.send(method, request.SerializeToString()) not in OUR_FAULTS


@SAME_EACH_TIME
@given(request=messages(inference_pb2.GenerateRequest.DESCRIPTOR), prompt=st.text(min_size=1, max_size=60))
def test_requests_that_have_a_prompt_at_least(
    target: Target, request: inference_pb2.GenerateRequest, prompt: str
) -> None:
    request.text, request.model, request.request_id = prompt, "", ""
    assert target.send("/kvrelay.pb.Inference/Generate", request.SerializeToString()) not in OUR_FAULTS


@SAME_EACH_TIME
@given(events=st.lists(messages(cluster_pb2.NodeEvent.DESCRIPTOR), min_size=1, max_size=4), joins=st.booleans())
def test_nodes_that_say_anything(target: Target, events: list[cluster_pb2.NodeEvent], joins: bool) -> None:
    """One that joins in order is a member until its stream ends, of whom the cluster hears the rest."""
    info = NodeInfo(Role.DECODE_NODE, InstanceId("rogue"), "127.0.0.1:9", MODEL)
    first = [cluster_pb2.NodeEvent(joined=convert_cluster.node_info_to_pb(info))] if joins else []
    said = (event.SerializeToString() for event in (*first, *events))
    assert target.send("/kvrelay.pb.Cluster/Join", *said) not in OUR_FAULTS


@SAME_EACH_TIME
@given(at=st.integers(0, 200), to=st.integers(0, 255))
def test_a_good_request_with_a_byte_changed(target: Target, at: int, to: int) -> None:
    request = inference_pb2.GenerateRequest(text="hello", cache_salt="a", keep_s=1.0, n=2, priority=3)
    request.sampling.temperature, request.sampling.max_tokens = 0.0, 4
    wire = bytearray(request.SerializeToString())
    wire[at % len(wire)] = to
    assert target.send("/kvrelay.pb.Inference/Generate", bytes(wire)) not in OUR_FAULTS
