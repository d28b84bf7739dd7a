"""The KV stream of one prompt, against a receiver that obeys the test, over a real gRPC call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import grpc
import pytest

from kvrelay.cluster import ModelInfo
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import CorruptBlockError, KVRelayError, StaleError, UnavailableError
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
from prefill_node.turns import Turns
from tests.support.known_link import known_link
from tests.support.receivers import FakeReceiver

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32", block_tokens=16)
MODEL = ModelInfo("tiny", "f" * 64, "llama", 1_024, 300, (2,), LAYOUT, "float32", "plain")
TOKEN = GeneratedToken(42)
JOB = JobId(1)
LARGE = KVLayout(num_layers=2, num_kv_heads=8, head_dim=256, dtype="float32", block_tokens=16)  # 512 KiB a slab


def model_of(layout: KVLayout, **changes: int) -> ModelInfo:
    return replace(MODEL, layout=replace(layout, **changes))  # type: ignore[arg-type]


def slab_of(block_id: int, layout: KVLayout = LAYOUT) -> bytes:
    return bytes([block_id % 251]) * layout.slab_bytes


@dataclass
class Handoff:
    """One sender and the receiver it talks to."""

    receiver: FakeReceiver
    address: str
    channel: grpc.aio.Channel
    progress: Progress = field(default_factory=Progress)
    model: ModelInfo = MODEL
    turns: Turns | None = None  # of the link; None: of a new one
    clock: Callable[[], float] = time.monotonic
    reads: list[tuple[BlockId, ...]] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)  # of each read, the bytes of the slabs

    def admit(self, num_tokens: int) -> None:
        block_ids = tuple(BlockId(100 + i) for i in range(LAYOUT.blocks_for(num_tokens)))
        self.progress.take(Admitted(JOB, block_ids, 0), now=0.0)

    def compute(self, num_tokens: int, token: GeneratedToken | None = None) -> None:
        self.progress.take(Computed(JOB, num_tokens, token), now=0.0)

    def view_slabs(self, block_ids: Seq[BlockId], start: int, end: int) -> list[bytes]:
        self.reads.append(tuple(block_ids))
        self.ranges.append((start, end))
        return [slab_of(block_id, self.model.layout)[start:end] for block_id in block_ids]

    async def send(self, num_tokens: int, first_block: int = 0, stall_s: float = 30.0) -> HandoffReport:
        token_ids = tuple(i % 300 for i in range(num_tokens))
        request = NodeRequest(RequestId("r"), token_ids, num_tokens, SamplingParams(seed=0, max_tokens=9))
        sequence = Sequence.create(request, chain_root(self.model.fingerprint, self.model.layout.fingerprint, b""), 16)
        target = HandoffTarget(self.address, InstanceId("decoder"), ReservationId("res"), 3, first_block)
        call = raw.stream_stream(self.channel, raw.KV_TRANSFER, "Receive")()
        turns = self.turns or Turns(self.model.layout.slab_bytes)
        sender = HandoffSender(
            *(call, turns, target, self.model, sequence, self.progress, self.view_slabs),
            stall_s=stall_s,
            clock=self.clock,
        )
        return await sender.send()


async def until(happened: Callable[[], bool], limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not happened():
            await asyncio.sleep(0.005)


Skip: TypeAlias = Callable[[float], None]


@pytest.fixture
def skip(monkeypatch: pytest.MonkeyPatch) -> Skip:
    """Moves the event loop's clock on by seconds, as if nothing had happened for so long."""

    def skip(seconds: float) -> None:
        loop = asyncio.get_running_loop()
        clock = loop.time
        monkeypatch.setattr(loop, "time", lambda: clock() + seconds)

    return skip


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
    assert handoff.reads == [(103, 104)]
    assert [frame.block_index for frame in handoff.receiver.blocks] == [3, 4]
    assert handoff.receiver.begin is not None
    assert (handoff.receiver.begin.first_block, handoff.receiver.begin.num_blocks) == (3, 2)
    assert report.num_bytes == 2 * 512


async def test_blocks_leave_as_their_chunks_end(handoff: Handoff) -> None:
    handoff.admit(40)
    sending = asyncio.create_task(handoff.send(40))
    handoff.compute(20)
    await handoff.receiver.wait_for_blocks(1)
    assert handoff.reads == [(100,)]  # block 1 is only half computed
    handoff.compute(33)
    await handoff.receiver.wait_for_blocks(2)
    handoff.compute(40, TOKEN)
    await sending
    assert [frame.kind for frame in handoff.receiver.blocks] == [FrameKind.BLOCK, FrameKind.BLOCK, FrameKind.TAIL]


@pytest.mark.parametrize(
    ("num_layers", "window"),
    [
        (2, ((100, 101), (102, 103))),
        (3, ((100,), (101,))),
        (4, ((100,), (101,))),
        (8, ((100,), (100,))),
        (20, ((100,), (100,))),
    ],
)
async def test_at_most_two_messages_are_unanswered_on_a_fast_link(
    handoff: Handoff, skip: Skip, num_layers: int, window: tuple[tuple[int, ...], ...]
) -> None:
    """Slabs of 1/2, 3/4, 1, 2 and 5 MiB. A receiver that does not answer holds the memory of the sender at two
    messages, however long the prompt; and each message is of about 1 MiB, also where a block is longer."""
    handoff.model = model_of(LARGE, num_layers=num_layers)
    handoff.turns = known_link(handoff.model.layout.slab_bytes)
    handoff.receiver.may_acknowledge.clear()
    handoff.admit(1_000)
    handoff.compute(1_000, TOKEN)
    sending = asyncio.create_task(handoff.send(1_000, stall_s=30.0))
    await until(lambda: len(handoff.reads) == len(window))
    await asyncio.wait([sending], timeout=0.1)
    skip(60.0)
    with pytest.raises(UnavailableError, match=r"decode node .*: no progress on the KV stream for 30 s"):
        await sending
    assert tuple(handoff.reads) == window
    assert handoff.turns.pace.in_flight_bytes == 0, "the link has back what the handoff held"


MIB = 2**20


@pytest.mark.parametrize(
    ("num_layers", "cuts"),
    [
        (8, [(0, MIB), (MIB, 2 * MIB)]),
        (20, [(0, MIB), (MIB, 2 * MIB), (2 * MIB, 3 * MIB), (3 * MIB, 4 * MIB), (4 * MIB, 5 * MIB)]),
    ],
)
async def test_a_slab_that_is_longer_than_a_message_leaves_in_parts(
    handoff: Handoff, num_layers: int, cuts: list[tuple[int, int]]
) -> None:
    """Slabs of 2 and 5 MiB: two full blocks and a tail. Only whole blocks are counted, in answers and in END."""
    handoff.model = model_of(LARGE, num_layers=num_layers)
    handoff.receiver.slab_bytes = handoff.model.layout.slab_bytes
    handoff.admit(37)
    handoff.compute(37, TOKEN)
    report = await handoff.send(37)
    frames, num_parts = handoff.receiver.blocks, len(cuts)
    assert [frame.block_index for frame in frames] == [0] * num_parts + [1] * num_parts + [2] * num_parts
    assert [(frame.offset_bytes, frame.offset_bytes + len(frame.payload)) for frame in frames] == cuts * 3
    assert handoff.ranges == cuts * 3
    assert {frame.kind for frame in frames[: 2 * num_parts]} == {FrameKind.BLOCK}
    assert len({frame.block_hash for frame in frames[:num_parts]}) == 1
    assert {(frame.kind, frame.num_tokens) for frame in frames[2 * num_parts :]} == {(FrameKind.TAIL, 5)}
    assert handoff.receiver.end is not None
    assert handoff.receiver.end.num_blocks == 3
    assert report.num_bytes == 3 * handoff.model.layout.slab_bytes
    assert max(handoff.receiver.messages) == MIB + 76


async def test_a_new_link_has_one_block_on_the_way_until_it_has_answered(handoff: Handoff) -> None:
    """Then two, then two messages of two. By a clock that stands still the link is fast on any machine."""
    handoff.model = model_of(LARGE)
    handoff.clock = lambda: 0.0
    handoff.receiver.may_acknowledge.clear()
    handoff.admit(160)
    handoff.compute(160, TOKEN)
    sending = asyncio.create_task(handoff.send(160))
    await handoff.receiver.wait_for_blocks(1)
    await asyncio.wait([sending], timeout=0.1)
    assert handoff.reads == [(100,)]
    handoff.receiver.may_acknowledge.set()
    await sending
    assert handoff.reads == [(100,), (101,), (102,), (103, 104), (105, 106), (107, 108), (109,)]


async def test_a_handoff_that_is_not_answered_does_not_hold_up_another_one(handoff: Handoff) -> None:
    """It fills the link. The other one's BEGIN is answered, which shows that all before it has arrived."""
    handoff.model = model_of(LARGE, num_layers=4)
    handoff.turns = known_link(handoff.model.layout.slab_bytes)
    handoff.receiver.may_acknowledge.clear()
    handoff.admit(160)
    handoff.compute(160, TOKEN)
    first = asyncio.create_task(handoff.send(160))
    await handoff.receiver.wait_for_blocks(1)
    second = asyncio.create_task(handoff.send(32))
    await until(lambda: len(handoff.reads) == 4)
    await asyncio.wait([first, second], timeout=0.1)
    assert handoff.reads == [(100,), (101,), (100,), (101,)], "neither has more than two messages unanswered"
    first.cancel()
    second.cancel()
    await asyncio.wait([first, second])
    assert handoff.turns.pace.in_flight_bytes == 0


async def test_a_commit_that_takes_its_time_keeps_no_other_handoff_waiting(handoff: Handoff) -> None:
    """END's answer waits for the decode engine. The link is free meanwhile, and not taken for slow."""
    handoff.model = model_of(LARGE, num_layers=4)
    handoff.turns = turns = known_link(handoff.model.layout.slab_bytes)
    bound_bytes = turns.pace.bound_bytes
    now = 0.0
    handoff.clock = lambda: now
    handoff.receiver.hold_commit_only = True
    handoff.receiver.may_acknowledge.clear()
    handoff.admit(32)
    handoff.compute(32, TOKEN)
    sending = asyncio.create_task(handoff.send(32))
    await handoff.receiver.wait_for_end()
    await until(lambda: turns.pace.in_flight_bytes == 0)
    now = 10.0
    handoff.receiver.may_acknowledge.set()
    await sending
    assert turns.pace.bound_bytes == bound_bytes


async def test_an_answer_lets_the_next_message_go(handoff: Handoff) -> None:
    handoff.model = model_of(LARGE)
    handoff.turns = known_link(handoff.model.layout.slab_bytes)
    handoff.receiver.may_acknowledge.clear()
    handoff.admit(160)
    handoff.compute(160, TOKEN)
    sending = asyncio.create_task(handoff.send(160))
    await handoff.receiver.wait_for_blocks(2)
    assert len(handoff.reads) <= 2
    handoff.receiver.may_acknowledge.set()
    await sending
    assert handoff.reads == [(100, 101), (102, 103), (104, 105), (106, 107), (108, 109)]
    assert len(handoff.receiver.blocks) == 10


async def test_a_message_is_as_full_as_the_kv_allows_and_waits_for_no_more(handoff: Handoff) -> None:
    """Chunks of 16, 80 and 17 tokens."""
    handoff.model = model_of(LARGE, num_layers=1)  # 256 KiB: four a message
    handoff.turns = known_link(handoff.model.layout.slab_bytes)
    handoff.admit(113)
    sending = asyncio.create_task(handoff.send(113))
    for computed, sent in ((16, 1), (96, 6)):
        handoff.compute(computed)
        await handoff.receiver.wait_for_blocks(sent)
    handoff.compute(113, TOKEN)
    await sending
    assert handoff.reads == [(100,), (101, 102, 103, 104), (105,), (106, 107)]
    assert len(handoff.receiver.messages) == 1 + 4 + 1, "BEGIN and END alone"


async def test_the_token_may_come_later_than_the_last_blocks(handoff: Handoff) -> None:
    handoff.admit(40)
    sending = asyncio.create_task(handoff.send(40))
    handoff.compute(40)
    await handoff.receiver.wait_for_blocks(3)
    assert handoff.receiver.end is None
    handoff.compute(40, TOKEN)
    await sending
    assert handoff.reads == [(100, 101, 102)]


async def test_one_answer_that_does_not_come_ends_it_while_the_prompt_still_computes(handoff: Handoff) -> None:
    """The window has room and the engine is not done: the wait counts from the first message all the same."""
    handoff.receiver.may_acknowledge.clear()
    handoff.admit(100)
    handoff.compute(16)
    async with asyncio.timeout(60):
        with pytest.raises(UnavailableError, match=r"decode node .*: no progress on the KV stream for 0\.2 s"):
            await handoff.send(100, stall_s=0.2)


async def test_a_prompt_that_is_slow_to_compute_is_no_stall(handoff: Handoff, skip: Skip) -> None:
    handoff.turns = turns = known_link(handoff.model.layout.slab_bytes)
    handoff.admit(32)
    handoff.compute(16)
    sending = asyncio.create_task(handoff.send(32, stall_s=30.0))
    await handoff.receiver.wait_for_blocks(1)
    await until(lambda: turns.pace.in_flight_bytes == 0)  # it is answered
    skip(60.0)  # twice as long as any answer may take
    await asyncio.wait([sending], timeout=0.01)
    assert not sending.done()
    handoff.compute(32, TOKEN)
    assert (await sending).num_bytes == 2 * handoff.model.layout.slab_bytes


async def test_an_answer_for_other_blocks_than_were_sent_is_refused(handoff: Handoff) -> None:
    handoff.receiver.miscount = 1
    handoff.admit(32)
    handoff.compute(32, TOKEN)
    with pytest.raises(CorruptBlockError, match=r"decode node .*: it answers for 3 blocks; 2 were due"):
        await handoff.send(32)


async def test_the_tail_is_the_time_from_the_first_token_to_the_commit(handoff: Handoff) -> None:
    """Of a receiver that commits 0.2 s after the token, of a handoff that began 0.1 s before."""
    handoff.receiver.hold_commit_only = True
    handoff.receiver.may_acknowledge.clear()
    handoff.admit(32)
    handoff.compute(16)
    sending = asyncio.create_task(handoff.send(32))
    await handoff.receiver.wait_for_blocks(1)
    await asyncio.wait([sending], timeout=0.1)
    handoff.progress.take(Computed(JOB, 32, TOKEN), now=time.monotonic())
    await handoff.receiver.wait_for_end()
    await asyncio.wait([sending], timeout=0.2)
    handoff.receiver.may_acknowledge.set()
    report = await sending
    assert 0.19 < report.tail_s < report.handoff_s - 0.09


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
    async with asyncio.timeout(60):
        with pytest.raises(UnavailableError, match=r"no progress on the KV stream for 0\.1 s"):
            await handoff.send(20, stall_s=0.1)
