"""The KV stream of one prompt, against a receiver that obeys the test, over a real gRPC call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import pytest

from kvrelay.cluster import ModelInfo
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import KVRelayError, StaleError, UnavailableError
from kvrelay.kv.frame import FrameKind
from kvrelay.kv.hashing import chain_root
from kvrelay.kv.layout import KVLayout
from kvrelay.messages import HandoffBegin, HandoffTarget, NodeRequest
from kvrelay.rpc import raw, server
from kvrelay.rpc.channel import open_channel
from kvrelay.sampling import GeneratedToken, SamplingParams
from kvrelay.types import BlockId, InstanceId, RequestId, ReservationId
from prefill_node.engine import Admitted, Computed, Failed
from prefill_node.progress import Progress
from prefill_node.scheduler import JobId
from prefill_node.sender import HandoffReport, HandoffSender
from tests.support.receivers import FakeReceiver

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32", block_tokens=16)
MODEL = ModelInfo("tiny", "f" * 64, "llama", 1_024, 300, (2,), LAYOUT, "float32", "plain")
TOKEN = GeneratedToken(42)
JOB = JobId(1)


def slab_of(block_id: int) -> bytes:
    return bytes([block_id % 251]) * LAYOUT.slab_bytes


@dataclass
class Handoff:
    """One sender and the receiver it talks to."""

    receiver: FakeReceiver
    address: str
    channel: grpc.aio.Channel
    progress: Progress = field(default_factory=Progress)
    reads: list[BlockId] = field(default_factory=list)

    def admit(self, num_tokens: int) -> None:
        block_ids = tuple(BlockId(100 + i) for i in range(LAYOUT.blocks_for(num_tokens)))
        self.progress.take(Admitted(JOB, block_ids, 0), now=0.0)

    def compute(self, num_tokens: int, token: GeneratedToken | None = None) -> None:
        self.progress.take(Computed(JOB, num_tokens, token), now=0.0)

    def read_slab(self, block_id: BlockId) -> bytes:
        self.reads.append(block_id)
        return slab_of(block_id)

    async def send(self, num_tokens: int, first_block: int = 0, stall_s: float = 30.0) -> HandoffReport:
        token_ids = tuple(i % 300 for i in range(num_tokens))
        request = NodeRequest(RequestId("r"), token_ids, num_tokens, SamplingParams(seed=0, max_tokens=9))
        sequence = Sequence.create(request, chain_root(MODEL.fingerprint, LAYOUT.fingerprint, b""), 16)
        target = HandoffTarget(self.address, InstanceId("decoder"), ReservationId("res"), 3, first_block)
        call = raw.stream_stream(self.channel, raw.KV_TRANSFER, "Receive")()
        sender = HandoffSender(call, target, MODEL, sequence, self.progress, self.read_slab, stall_s=stall_s)
        return await sender.send()


@pytest.fixture
async def handoff() -> AsyncIterator[Handoff]:
    receiver = FakeReceiver()
    grpc_server = server.make_server()
    grpc_server.add_generic_rpc_handlers((receiver.handler(),))
    address = f"127.0.0.1:{server.bind(grpc_server, '127.0.0.1', 0)}"
    await grpc_server.start()
    channel = open_channel(address)
    yield Handoff(receiver, address, channel)
    receiver.may_acknowledge.set()
    await channel.close()
    await grpc_server.stop(None)


@pytest.mark.parametrize(
    ("num_tokens", "num_full", "tail_tokens"),
    [(1, 0, 1), (2, 0, 2), (15, 0, 15), (16, 1, 0), (17, 1, 1), (31, 1, 15), (32, 2, 0), (33, 2, 1)],
)
async def test_full_blocks_carry_hashes_and_a_partial_last_one_is_the_tail(
    handoff: Handoff, num_tokens: int, num_full: int, tail_tokens: int
) -> None:
    handoff.admit(num_tokens)
    handoff.compute(num_tokens, TOKEN)
    report = await handoff.send(num_tokens)
    frames = handoff.receiver.blocks
    kinds = [FrameKind.BLOCK] * num_full + [FrameKind.TAIL] * bool(tail_tokens)
    assert [frame.kind for frame in frames] == kinds
    assert [frame.block_index for frame in frames] == list(range(len(kinds)))
    assert [bytes(frame.payload) for frame in frames[:num_full]] == [slab_of(100 + i) for i in range(num_full)]
    if tail_tokens:
        assert frames[-1].num_tokens == tail_tokens
    assert handoff.receiver.end is not None
    assert handoff.receiver.end.first_token == TOKEN
    assert report.num_bytes == len(kinds) * 512
    assert handoff.receiver.begin == HandoffBegin(
        reservation_id=ReservationId("res"),
        instance_id=InstanceId("decoder"),
        attempt=3,
        model_fingerprint="f" * 64,
        layout_fingerprint=LAYOUT.fingerprint,
        first_block=0,
        num_blocks=len(kinds),
    )


async def test_the_tail_leaves_with_zeros_where_an_earlier_owners_kv_may_lie(handoff: Handoff) -> None:
    """19 tokens: of the second block K and V of 3 positions are sent, 16 bytes each; the rest of both is zeros."""
    handoff.admit(19)
    handoff.compute(19, TOKEN)
    await handoff.send(19)
    rows = bytes([101]) * 48 + bytes(13 * 16)
    assert bytes(handoff.receiver.blocks[1].payload) == rows + rows


async def test_blocks_the_decode_node_has_are_neither_read_nor_sent(handoff: Handoff) -> None:
    handoff.admit(70)
    handoff.compute(70, TOKEN)
    report = await handoff.send(70, first_block=3)
    assert handoff.reads == [103, 104]
    assert [frame.block_index for frame in handoff.receiver.blocks] == [3, 4]
    assert handoff.receiver.begin is not None
    assert (handoff.receiver.begin.first_block, handoff.receiver.begin.num_blocks) == (3, 2)
    assert report.num_bytes == 2 * 512


async def test_blocks_leave_as_their_chunks_end(handoff: Handoff) -> None:
    handoff.admit(40)
    sending = asyncio.create_task(handoff.send(40))
    handoff.compute(20)
    await handoff.receiver.wait_for_blocks(1)
    assert handoff.reads == [100]  # block 1 is only half computed
    handoff.compute(33)
    await handoff.receiver.wait_for_blocks(2)
    handoff.compute(40, TOKEN)
    await sending
    assert [frame.kind for frame in handoff.receiver.blocks] == [FrameKind.BLOCK, FrameKind.BLOCK, FrameKind.TAIL]


async def test_at_most_two_blocks_are_unacknowledged(handoff: Handoff) -> None:
    """A receiver that does not acknowledge holds the sender's memory at two slabs, however long the prompt."""
    handoff.receiver.may_acknowledge.clear()
    handoff.admit(1_000)
    handoff.compute(1_000, TOKEN)
    with pytest.raises(UnavailableError, match=r"decode node .*: no progress on the KV stream for 0\.2 s"):
        await handoff.send(1_000, stall_s=0.2)
    assert handoff.reads == [100, 101]


async def test_acknowledging_lets_the_next_blocks_go(handoff: Handoff) -> None:
    handoff.receiver.may_acknowledge.clear()
    handoff.admit(160)
    handoff.compute(160, TOKEN)
    sending = asyncio.create_task(handoff.send(160))
    handoff.receiver.may_acknowledge.set()
    await sending
    assert len(handoff.receiver.blocks) == 10


async def test_a_refusal_comes_back_as_the_decode_node_named_it(handoff: Handoff) -> None:
    """Also while the prompt is still computing, so that it can be stopped at once."""
    handoff.receiver.refusal = StaleError("reservation res has ended")
    handoff.admit(100)
    with pytest.raises(StaleError, match=rf"decode node {handoff.address}: reservation res has ended"):
        await handoff.send(100)


@pytest.mark.parametrize("failure", [None, UnavailableError("draining")])
async def test_a_stream_that_ends_early_is_no_handoff(handoff: Handoff, failure: KVRelayError | None) -> None:
    handoff.receiver.fail_after, handoff.receiver.failure = 2, failure
    handoff.admit(100)
    handoff.compute(64)
    with pytest.raises(UnavailableError, match="decode node"):
        await handoff.send(100)


async def test_an_unreachable_decode_node_is_unavailable(handoff: Handoff) -> None:
    handoff.channel = open_channel("127.0.0.1:1")
    handoff.admit(100)
    with pytest.raises(UnavailableError, match="decode node"):
        await handoff.send(100)
    await handoff.channel.close()


async def test_a_job_that_fails_breaks_the_stream(handoff: Handoff) -> None:
    handoff.admit(100)
    sending = asyncio.create_task(handoff.send(100))
    handoff.compute(32)
    await handoff.receiver.wait_for_blocks(2)
    handoff.progress.take(Failed(JOB, KVRelayError("the engine failed")), now=0.0)
    with pytest.raises(KVRelayError, match="the engine failed"):
        await sending
    await handoff.receiver.wait_for_close()
    assert handoff.receiver.end is None


async def test_cancelling_breaks_the_stream(handoff: Handoff) -> None:
    handoff.admit(100)
    sending = asyncio.create_task(handoff.send(100))
    handoff.compute(32)
    await handoff.receiver.wait_for_blocks(2)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await handoff.receiver.wait_for_close()
    assert handoff.receiver.end is None


async def test_a_write_that_does_not_get_through_is_given_up(handoff: Handoff, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flow control of the connection holds it, and nobody answers."""

    async def write(call: object, message: bytes) -> None:
        await asyncio.Event().wait()

    call = raw.stream_stream(handoff.channel, raw.KV_TRANSFER, "Receive")()
    monkeypatch.setattr(type(call), "write", write)
    call.cancel()
    handoff.admit(20)
    async with asyncio.timeout(10):
        with pytest.raises(UnavailableError, match=r"no progress on the KV stream for 0\.1 s"):
            await handoff.send(20, stall_s=0.1)
