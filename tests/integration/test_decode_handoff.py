"""KV streams over real gRPC, good and hostile: nothing unproven is used, nothing is stranded, another attempt works."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from decode_node.receiver import Receiver
from kvrelay.errors import (
    AlreadyCommittedError,
    CorruptBlockError,
    ForeignBlockError,
    InvalidRequestError,
    KVRelayError,
    StaleError,
)
from kvrelay.kv.frame import MESSAGE_BYTES, Frame, FrameKind, control_frame, encode
from kvrelay.kv.hashing import ChecksumChain, slab_checksum
from kvrelay.messages import BlocksReceived, DecodeFinished, NodeRequest, ReservationGranted, TokensDecoded
from kvrelay.rpc.nodes import DecodeClient
from kvrelay.sampling import GeneratedToken
from kvrelay.types import BlockHash, FinishReason, InstanceId, ReservationId
from tests.support.decode_harness import (
    Handoff,
    Harness,
    begin_message,
    decode_node,
    end_message,
    hand_over,
    send,
)
from tests.support.fake_engine import make_request, slab_of
from tests.support.manual_clock import ManualClock

PROMPT = tuple(range(10, 20))  # two full blocks of 4 and a tail of 2
REQUEST = make_request(PROMPT, max_tokens=4)


async def reserve(harness: Harness, request: NodeRequest = REQUEST) -> ReservationGranted:
    num_tokens = request.num_prompt_tokens + (request.sampling.max_tokens or 0)
    return await harness.client.reserve(request, num_tokens, timeout_s=30.0)


def handoff(harness: Harness, granted: ReservationGranted, **changes: object) -> Handoff:
    return Handoff(harness.node.info, REQUEST, granted, **changes)  # type: ignore[arg-type]


async def read_answer(client: DecodeClient, reservation_id: ReservationId) -> tuple[list[int], DecodeFinished]:
    token_ids: list[int] = []
    async with client.decode(reservation_id, timeout_s=60.0) as events:
        async for event in events:
            if isinstance(event, DecodeFinished):
                return token_ids, event
            token_ids.extend(token.token_id for token in event.tokens)
    raise AssertionError("the stream ended without DecodeFinished")


async def test_a_handed_over_prompt_is_decoded_and_its_bytes_are_the_senders() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        assert (granted.instance_id, granted.num_cached_blocks, granted.lease_s) == ("decode-instance", 0, 10.0)
        reading = asyncio.create_task(read_answer(harness.client, granted.reservation_id))
        received = await hand_over(harness, handoff(harness, granted).messages())
        assert received == [
            BlocksReceived(0, False),
            BlocksReceived(1, False),
            BlocksReceived(2, False),
            BlocksReceived(3, False),
            BlocksReceived(3, True),
        ]
        assert await reading == ([20, 21, 22, 23], DecodeFinished(FinishReason.LENGTH))
        entry_blocks = harness.pool.match(handoff(harness, granted).sequence().block_hashes)
        assert [harness.cache.read_slab(block_id) for block_id in entry_blocks] == [slab_of(0), slab_of(1)]
        assert harness.registry.get_sample_value("kvrelay_handoff_bytes_total") == 3 * 256


@pytest.mark.parametrize(
    ("messages", "answers"),
    [
        (((0,), (1, 2, 3, 4)), [(0, False), (3, True)]),
        (((0,), (1, 2), (3, 4)), [(0, False), (2, False), (3, True)]),
        (((0,), (1,), (2, 3), (4,)), [(0, False), (1, False), (3, False), (3, True)]),
    ],
)
async def test_blocks_and_end_may_share_messages_and_each_message_has_one_answer(
    messages: tuple[tuple[int, ...], ...], answers: list[tuple[int, bool]]
) -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        received = await hand_over(harness, joined(*messages)(handoff(harness, granted)))
        assert received == [BlocksReceived(*answer) for answer in answers]
        assert (await read_answer(harness.client, granted.reservation_id))[0] == [20, 21, 22, 23]
        assert harness.registry.get_sample_value("kvrelay_handoff_blocks_received_total") == 3


async def test_slabs_may_come_in_parts_and_answers_count_whole_blocks() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        order = ((0, 0, 100), (0, 100, 256), (1, 0, 256), (2, 0, 1), (2, 1, 2), (2, 2, 256))
        received = await hand_over(harness, in_parts(handoff(harness, granted), *order))
        assert [answer.num_blocks for answer in received] == [0, 0, 1, 2, 2, 2, 3, 3]
        assert [answer.committed for answer in received] == [False] * 7 + [True]
        entry_blocks = harness.pool.match(handoff(harness, granted).sequence().block_hashes)
        assert [harness.cache.read_slab(block_id) for block_id in entry_blocks] == [slab_of(0), slab_of(1)]
        assert (await read_answer(harness.client, granted.reservation_id))[0] == [20, 21, 22, 23]
        assert harness.registry.get_sample_value("kvrelay_handoff_blocks_received_total") == 3
        assert harness.registry.get_sample_value("kvrelay_handoff_bytes_total") == 3 * 256


async def test_decode_may_be_opened_after_the_commit() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        await hand_over(harness, handoff(harness, granted).messages())
        assert (await harness.counts()).held == 4
        assert await read_answer(harness.client, granted.reservation_id) == (
            [20, 21, 22, 23],
            DecodeFinished(FinishReason.LENGTH),
        )


async def test_a_first_token_that_ends_the_answer_needs_no_step() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        await hand_over(harness, handoff(harness, granted, first_token=GeneratedToken(2)).messages())
        assert await read_answer(harness.client, granted.reservation_id) == ([2], DecodeFinished(FinishReason.STOP))
        assert harness.runner.batches == []  # type: ignore[attr-defined]


async def test_blocks_cached_here_are_not_sent_again() -> None:
    async with decode_node() as harness:
        first = await reserve(harness)
        await hand_over(harness, handoff(harness, first).messages())
        await read_answer(harness.client, first.reservation_id)
        second = await reserve(harness)
        assert second.num_cached_blocks == 2
        received = await hand_over(harness, handoff(harness, second).messages())
        assert received[-1] == BlocksReceived(1, True)
        assert (await read_answer(harness.client, second.reservation_id))[0] == [20, 21, 22, 23]


Spoil = Callable[[Handoff], list[bytes]]


def with_begin(**fields: object) -> Spoil:
    def spoil(good: Handoff) -> list[bytes]:
        return [begin_message(dataclasses.replace(good.begin(), **fields)), *good.messages()[1:]]  # type: ignore[arg-type]

    return spoil


def with_end(**fields: object) -> Spoil:
    def spoil(good: Handoff) -> list[bytes]:
        return [*good.messages()[:-1], end_message(dataclasses.replace(good.end(), **fields))]  # type: ignore[arg-type]

    return spoil


def with_block(index: int, **fields: object) -> Spoil:
    def spoil(good: Handoff) -> list[bytes]:
        messages = good.messages()
        frame = good.blocks()[index]
        messages[1 + index] = encode(dataclasses.replace(frame, **fields))  # type: ignore[arg-type]
        return messages

    return spoil


def flipped(index: int, position: int) -> Spoil:
    """One bit of one message turns over on the way."""

    def spoil(good: Handoff) -> list[bytes]:
        messages = good.messages()
        message = bytearray(messages[index])
        message[position] ^= 1
        messages[index] = bytes(message)
        return messages

    return spoil


def picked(*order: int) -> Spoil:
    return lambda good: [good.messages()[i] for i in order]


def joined(*messages: tuple[int, ...]) -> Spoil:
    """The frames of the good messages, several to one."""
    return lambda good: [b"".join(good.messages()[i] for i in indexes) for indexes in messages]


def in_parts(good: Handoff, *order: tuple[int, int, int]) -> list[bytes]:
    """Bytes of blocks: (block, start, end), a message each. END's checksum is of these."""
    blocks, chain, messages = good.blocks(), ChecksumChain(), []
    for index, start, end in order:
        payload = memoryview(blocks[index].payload)[start:end]
        checksum = slab_checksum(payload)
        part = dataclasses.replace(blocks[index], payload=payload, offset_bytes=start, checksum=checksum)
        chain.add(checksum)
        messages.append(encode(part))
    fitting = dataclasses.replace(good.end(), checksum=chain.digest())
    return [begin_message(good.begin()), *messages, end_message(fitting)]


def parts(*order: tuple[int, int, int]) -> Spoil:
    return lambda good: in_parts(good, *order)


def more_than_a_message_holds(good: Handoff) -> list[bytes]:
    begin, block, *_ = good.messages()
    return [begin, block * (1 + MESSAGE_BYTES // len(block))]


def another_prompt(good: Handoff) -> list[bytes]:
    """Right frames of the wrong prompt."""
    request = make_request((*PROMPT[:-3], 77, *PROMPT[-2:]), max_tokens=4)
    other = dataclasses.replace(good, request=request)
    return [good.messages()[0], *other.messages()[1:]]


HOSTILE: dict[str, tuple[Spoil, type[KVRelayError], str]] = {
    "wrong checksum": (with_block(1, checksum=bytes(16)), CorruptBlockError, "block 1: payload fails its checksum"),
    "bit of a block": (flipped(2, 100), CorruptBlockError, "block 1: payload fails its checksum"),
    "bit of the tail": (flipped(3, 200), CorruptBlockError, "TAIL frame, block 2: payload fails its checksum"),
    "bit of a header": (flipped(1, 13), CorruptBlockError, "frame header fails its CRC-32"),
    "bit of BEGIN": (flipped(0, 80), CorruptBlockError, "payload fails its checksum"),
    "bit of END": (flipped(4, 80), CorruptBlockError, "payload fails its checksum"),
    "wrong hash": (with_block(0, block_hash=BlockHash(b"x" * 32)), CorruptBlockError, "block 0 has hash 7878"),
    "another prompt": (another_prompt, CorruptBlockError, "the prompt's chain has"),
    "foreign model": (with_begin(model_fingerprint="cd" * 32), ForeignBlockError, "model fingerprint is cdcd"),
    "foreign layout": (with_begin(layout_fingerprint="ef" * 32), ForeignBlockError, "KV layout is efef"),
    "wrong instance": (with_begin(instance_id=InstanceId("dead")), StaleError, "for instance dead"),
    "wrong first block": (with_begin(first_block=1), InvalidRequestError, "missing here are 3 from block 0"),
    "too few announced": (with_begin(num_blocks=2), InvalidRequestError, "missing here are 3 from block 0"),
    "unknown reservation": (with_begin(reservation_id=ReservationId("x")), StaleError, "x does not exist"),
    "short slab": (with_block(0, payload=b"short"), CorruptBlockError, "checksum|bytes"),
    "out of order": (picked(0, 2, 1, 3, 4), CorruptBlockError, "BLOCK of block 0 is due"),
    "doubled block": (picked(0, 1, 1, 2, 3, 4), CorruptBlockError, "BLOCK of block 1 is due"),
    "missing block": (picked(0, 1, 3, 4), CorruptBlockError, "BLOCK of block 1 is due"),
    "missing tail": (picked(0, 1, 2, 4), CorruptBlockError, "END counts 3 blocks after 2 came"),
    "no BEGIN": (picked(1, 2, 3, 4), CorruptBlockError, "starts with BEGIN, not BLOCK"),
    "second BEGIN": (picked(0, 0), CorruptBlockError, "BEGIN frame of block 0 came"),
    "wrong END count": (with_end(num_blocks=2), CorruptBlockError, "END counts 2 blocks after 3 came"),
    "wrong END checksum": (with_end(checksum=bytes(16)), CorruptBlockError, "END's checksum is not that"),
    "a part left out": (parts((0, 0, 100), (0, 200, 256)), CorruptBlockError, "due are those from byte 100 on"),
    "a part doubled": (parts((0, 0, 100), (0, 0, 100)), CorruptBlockError, "due are those from byte 100 on"),
    "parts that overlap": (parts((0, 0, 100), (0, 99, 256)), CorruptBlockError, "due are those from byte 100 on"),
    "the second part first": (parts((0, 100, 256), (0, 0, 100)), CorruptBlockError, "due are those from byte 0 on"),
    "a part of the next block": (parts((0, 0, 100), (1, 100, 256)), CorruptBlockError, "BLOCK of block 0 is due"),
    "END in the middle of a slab": (
        parts((0, 0, 256), (1, 0, 256), (2, 0, 9)),
        CorruptBlockError,
        "END came after 9 of 256 bytes of block 2",
    ),
    "BEGIN and a block at once": (joined((0, 1), (2, 3, 4)), CorruptBlockError, "BEGIN comes in a message of its own"),
    "END before the tail": (
        joined((0,), (1, 2, 4, 3)),
        CorruptBlockError,
        "END frame of block 0 came; TAIL of block 2",
    ),
    "a block after END": (joined((0,), (1, 2, 3, 4, 1)), CorruptBlockError, "END frame follows the last of 3 blocks"),
    "two ENDs": (joined((0,), (1, 2, 3, 4, 4)), CorruptBlockError, "END frame follows the last of 3 blocks"),
    "an endless message": (more_than_a_message_holds, CorruptBlockError, "one of several frames has at most 1114112"),
    "a cut message": (
        lambda good: [good.messages()[0], b"".join(good.messages()[1:])[:-1]],
        CorruptBlockError,
        "END frame announces",
    ),
    "not a frame": (lambda good: [good.messages()[0], b"GET / HTTP/1.1\r\n\r\n"], CorruptBlockError, "shorter than"),
    "empty message": (lambda good: [b""], CorruptBlockError, "shorter than its header"),
    "BEGIN of noise": (
        lambda good: [encode(control_frame(FrameKind.BEGIN, b"\xff" * 9))],
        InvalidRequestError,
        "no HandoffBegin",
    ),
} | {
    f"cut after {count} frames": (picked(*range(count)), CorruptBlockError, "ended before its END frame")
    for count in range(1, 5)
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_stream_commits_nothing_and_the_next_attempt_succeeds(name: str) -> None:
    spoil, error, message = HOSTILE[name]
    async with decode_node() as harness:
        granted = await reserve(harness)
        reading = asyncio.create_task(read_answer(harness.client, granted.reservation_id))
        with pytest.raises(error, match=message):
            await hand_over(harness, spoil(handoff(harness, granted)))
        counts = await harness.counts()
        assert (counts.reserved, counts.held, counts.cached) == (4, 0, 0), "set aside still, nothing committed"
        assert not reading.done()
        assert refusals(harness) == {error.code: 1.0}
        await hand_over(harness, handoff(harness, granted, attempt=1).messages())
        assert (await reading)[0] == [20, 21, 22, 23]


def refusals(harness: Harness) -> dict[str, float]:
    (family,) = (f for f in harness.registry.collect() if f.name == "kvrelay_handoffs_refused")
    return {s.labels["code"]: s.value for s in family.samples if s.name.endswith("_total")}


@pytest.mark.parametrize("frames_sent", range(5))
async def test_a_sender_that_vanishes_between_frames_leaves_the_reservation_for_another(frames_sent: int) -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        reading = asyncio.create_task(read_answer(harness.client, granted.reservation_id))
        call = harness.open_handoff()
        for message in handoff(harness, granted).messages()[:frames_sent]:
            await send(call, message)
        call.cancel()
        await hand_over(harness, handoff(harness, granted, attempt=1).messages())
        assert (await reading)[0] == [20, 21, 22, 23]


async def test_a_late_frame_of_an_old_attempt_is_refused_and_writes_nothing() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        old, new = harness.open_handoff(), harness.open_handoff()
        stale = handoff(harness, granted, slab=lambda index: slab_of(index + 100)).messages()
        for message in stale[:2]:
            await send(old, message)
        good = handoff(harness, granted, attempt=1).messages()
        for message in good[:2]:
            await send(new, message)
        with pytest.raises(StaleError, match=r"attempt 0 of reservation \w+ is over: 1 has begun"):
            await send(old, stale[2])
        for message in good[2:]:
            last = await send(new, message)
        assert last.committed
        hashes = handoff(harness, granted).sequence().block_hashes
        assert [harness.cache.read_slab(i) for i in harness.pool.match(hashes)] == [slab_of(0), slab_of(1)]
        assert (await read_answer(harness.client, granted.reservation_id))[0] == [20, 21, 22, 23]


async def test_no_block_of_an_old_attempts_message_is_written() -> None:
    """The message is here already when the next attempt begins."""
    async with decode_node() as harness:
        granted = await reserve(harness)
        begin, *stale = handoff(harness, granted).messages()

        async def messages() -> AsyncIterator[bytes]:
            yield begin
            harness.node.begin_receive(granted.reservation_id, 1)
            yield b"".join(stale)

        events = Receiver(harness.node).receive(messages())
        assert await anext(events) == BlocksReceived(0, False)
        with pytest.raises(StaleError, match=r"attempt 0 of reservation \w+ is over: 1 has begun"):
            await anext(events)
        assert harness.cache.slabs == {}  # type: ignore[attr-defined]
        await harness.client.release(granted.reservation_id)


async def test_an_interrupted_stream_ends_even_where_its_reservation_stands() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        begin, *_ = handoff(harness, granted).messages()

        async def messages() -> AsyncIterator[bytes]:
            yield begin
            await asyncio.Event().wait()

        events = Receiver(harness.node).receive(messages())
        assert await anext(events) == BlocksReceived(0, False)
        harness.node._requests[granted.reservation_id].interrupted.set()
        with pytest.raises(StaleError, match="was interrupted"):
            await anext(events)
        await harness.client.release(granted.reservation_id)


async def test_a_sender_that_goes_silent_is_ended_by_the_lease() -> None:
    """It keeps its connection and its call."""
    clock = ManualClock()
    async with decode_node(lease_s=10.0, clock=clock) as harness, asyncio.timeout(60.0):
        granted = await reserve(harness)
        call = harness.open_handoff()
        for message in handoff(harness, granted).messages()[:2]:
            await send(call, message)
        clock.now += 10.0
        harness.node.expire_leases()
        assert await call.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert (await harness.all_free()).free == 32


async def test_a_silent_sender_goes_with_the_decode_call_that_holds_the_lease() -> None:
    clock = ManualClock()
    async with decode_node(lease_s=10.0, clock=clock) as harness, asyncio.timeout(60.0):
        granted = await reserve(harness)
        reading = asyncio.create_task(read_answer(harness.client, granted.reservation_id))
        call = harness.open_handoff()
        begin, first, second, *_ = handoff(harness, granted).messages()
        for message in (begin, first):
            await send(call, message)
        while not harness.node.reservations.get(granted.reservation_id).decoding:
            await asyncio.sleep(0)
        clock.now += 15.0
        harness.node.expire_leases()
        await send(call, second)  # is answered: a prompt may take longer to compute than a lease lasts
        reading.cancel()
        assert await call.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert (await harness.all_free()).free == 32


async def test_a_call_on_which_nothing_comes_is_ended() -> None:
    async with decode_node(lease_s=0.3) as harness, asyncio.timeout(60.0):
        call = harness.open_handoff()
        assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert await call.details() == "no BEGIN came within 0.3 s"


async def test_a_superseded_stream_is_closed_without_waiting_for_its_next_frame() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        old, new = harness.open_handoff(), harness.open_handoff()
        await send(old, handoff(harness, granted).messages()[0])
        await send(new, handoff(harness, granted, attempt=1).messages()[0])
        assert await old.code() == grpc.StatusCode.FAILED_PRECONDITION
        new.cancel()
        await harness.client.release(granted.reservation_id)


async def test_an_older_attempt_cannot_begin_after_a_newer_one() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        call = harness.open_handoff()
        await send(call, handoff(harness, granted, attempt=5).messages()[0])
        call.cancel()
        with pytest.raises(StaleError, match=r"attempt 4 of reservation \w+ is over: 5 has begun"):
            await hand_over(harness, handoff(harness, granted, attempt=4).messages())
        await harness.client.release(granted.reservation_id)


async def test_a_second_handoff_after_the_commit_is_refused() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        await hand_over(harness, handoff(harness, granted).messages())
        with pytest.raises(StaleError, match="has its KV already"):
            await hand_over(harness, handoff(harness, granted, attempt=1).messages())
        assert (await read_answer(harness.client, granted.reservation_id))[0] == [20, 21, 22, 23]


async def test_a_release_closes_a_stream_that_is_under_way() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        call = harness.open_handoff()
        for message in handoff(harness, granted).messages()[:2]:
            await send(call, message)
        await harness.client.release(granted.reservation_id)
        assert await call.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert (await harness.all_free()).free == 32


async def test_statuses_are_those_of_the_table() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        call = harness.open_handoff()
        await send(call, handoff(harness, granted).messages()[0])
        frame: Frame = dataclasses.replace(handoff(harness, granted).blocks()[0], checksum=bytes(16))
        await call.write(encode(frame))
        assert await call.code() == grpc.StatusCode.DATA_LOSS
        assert await call.details() == "BLOCK frame, block 0: payload fails its checksum"
        await harness.client.release(granted.reservation_id)


async def test_after_a_broken_stream_the_node_may_compute_the_prompt_itself() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        with pytest.raises(CorruptBlockError, match="ended before its END frame"):
            await hand_over(harness, handoff(harness, granted).messages()[:3])
        events = harness.client.decode(granted.reservation_id, compute_tail=True)
        token_ids = [t.token_id async for e in events if isinstance(e, TokensDecoded) for t in e.tokens]
        assert token_ids == [20, 21, 22, 23]


async def test_a_commit_stands_when_its_answer_is_lost() -> None:
    """The sender's call ends between END and the answer: the tokens come, and another attempt hears that it is done."""
    async with decode_node() as harness:
        granted = await reserve(harness)
        *frames, end = handoff(harness, granted).messages()
        call = harness.open_handoff()
        for frame in frames:
            await send(call, frame)
        await call.write(end)
        while harness.node.reservations.num_pending:  # the server runs in this very loop
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(AlreadyCommittedError, match="attempt 1 is not needed"):
            await hand_over(harness, handoff(harness, granted, attempt=1).messages()[:1])
        assert await read_answer(harness.client, granted.reservation_id) == (
            [20, 21, 22, 23],
            DecodeFinished(FinishReason.LENGTH),
        )
