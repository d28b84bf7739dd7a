"""The frames of a prompt's blocks: in order, each once, cut where a message has no room, and nothing of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.handoff import HandoffChecker
from kvrelay.engine.sequence import Sequence as TokenSequence
from kvrelay.kv import frame as frame_module
from kvrelay.kv.frame import Frame, decode, encode, frames_per_message, part_bytes
from kvrelay.kv.layout import KVLayout
from kvrelay.messages import HandoffBegin, HandoffEnd
from kvrelay.sampling import GeneratedToken
from kvrelay.types import BlockHash, BlockId, InstanceId, ReservationId
from prefill_node.parts import Parts
from tests.support.fake_engine import FakeCache, make_request

HEADER = 76
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32", block_tokens=4)  # 256 bytes a slab
BLOCK_IDS = tuple(BlockId(20 - i) for i in range(6))


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    set_message_bytes(monkeypatch, HEADER + 100)


def set_message_bytes(patch: pytest.MonkeyPatch, num_bytes: int) -> None:
    patch.setattr(frame_module, "MESSAGE_BYTES", num_bytes)
    patch.setattr(frame_module, "MAX_PART_BYTES", num_bytes - HEADER)


def slab_of(block_id: BlockId) -> bytes:
    return bytes((block_id * 7 + i) % 255 + 1 for i in range(LAYOUT.slab_bytes))


def view_slabs(block_ids: Sequence[BlockId], start: int, end: int) -> list[bytes]:
    return [slab_of(block_id)[start:end] for block_id in block_ids]


def sequence_of(num_tokens: int) -> TokenSequence:
    request = make_request(tuple(10 + i for i in range(num_tokens)))
    return TokenSequence.create(request, BlockHash(bytes(32)), LAYOUT.block_tokens)


def parts_of(num_tokens: int, first_block: int = 0) -> Parts:
    return Parts(LAYOUT, sequence_of(num_tokens), first_block, view_slabs)


def test_slabs_that_fit_are_whole() -> None:
    parts = parts_of(10)
    assert (parts.num_blocks, parts.num_waiting(10)) == (3, 3)
    frames = parts.take(BLOCK_IDS, 3)
    assert [(frame.block_index, frame.offset_bytes, len(frame.payload)) for frame in frames] == [
        (0, 0, 256),
        (1, 0, 256),
        (2, 0, 256),
    ]
    assert parts.all_taken
    assert (parts.num_blocks_taken, parts.num_bytes) == (3, 768)


@pytest.mark.usefixtures("small_messages")
def test_slabs_that_do_not_are_cut_into_as_few_parts_as_fit() -> None:
    parts = parts_of(10, first_block=1)
    assert (parts.num_blocks, parts.num_waiting(10)) == (2, 6)
    taken = []
    while not parts.all_taken:
        (frame,) = parts.take(BLOCK_IDS, 1)
        taken.append((frame.block_index, frame.offset_bytes, len(frame.payload), parts.num_blocks_taken))
    assert taken == [(1, 0, 86, 0), (1, 86, 86, 0), (1, 172, 84, 1), (2, 0, 86, 1), (2, 86, 86, 1), (2, 172, 84, 2)]
    assert parts.num_bytes == 512
    assert parts.num_waiting(10) == 0


@pytest.mark.usefixtures("small_messages")
@pytest.mark.parametrize(
    ("num_computed", "num_waiting"), [(0, 0), (3, 0), (4, 0), (7, 0), (8, 3), (9, 3), (10, 6), (11, 6)]
)
def test_the_parts_of_blocks_that_are_final_wait(num_computed: int, num_waiting: int) -> None:
    """Of a prompt of 10 tokens, two blocks and a half, of which the first is there already."""
    assert parts_of(10, first_block=1).num_waiting(num_computed) == num_waiting


def messages(parts: Parts, most: Iterator[int]) -> Iterator[list[Frame]]:
    """As the sender makes them, of at most so many parts each."""
    while not parts.all_taken:
        num_parts = min(parts.num_waiting(24), next(most), frames_per_message(part_bytes(LAYOUT.slab_bytes)))
        yield parts.take(BLOCK_IDS, num_parts)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 24), st.data(), st.integers(HEADER + 1, 2_000))
def test_what_is_taken_is_believed_by_the_receiver_and_is_the_senders_kv(
    num_tokens: int, data: st.DataObject, message_bytes: int
) -> None:
    """Whatever a message has room for. Past the prompt's last token there are zeros."""
    num_blocks = LAYOUT.blocks_for(num_tokens)
    first_block = data.draw(st.integers(0, num_blocks - 1))
    with pytest.MonkeyPatch.context() as patch:
        set_message_bytes(patch, message_bytes)
        parts, target = parts_of(num_tokens, first_block), FakeCache(LAYOUT)
        begin = HandoffBegin(ReservationId("a"), InstanceId("b"), 0, "", "", first_block, parts.num_blocks)
        checker = HandoffChecker(begin, sequence_of(num_tokens), first_block, LAYOUT.slab_bytes)
        most = iter(lambda: data.draw(st.integers(1, 9)), 0)
        for frames in messages(parts, most):
            message = encode(*frames)
            assert len(message) <= message_bytes
            for frame in decode(message, max_payload_bytes=256, parts=True):
                target.write_part(BlockId(checker.accept(frame)), frame.payload, frame.offset_bytes)
            assert checker.num_received == parts.num_blocks_taken, "both count whole blocks alike"
        checker.finish(HandoffEnd(parts.num_blocks_taken, parts.digest(), GeneratedToken(1)))
    slabs = {BlockId(i): slab_of(BLOCK_IDS[i]) for i in range(first_block, num_blocks)}
    if num_tokens % 4:
        slabs[BlockId(num_blocks - 1)] = zeroed(slab_of(BLOCK_IDS[num_blocks - 1]), num_tokens % 4)
    assert target.slabs == slabs


def zeroed(slab: bytes, num_tokens: int) -> bytes:
    """Rows of 16 bytes; four make a plane."""
    return bytes(byte if i // 16 % 4 < num_tokens else 0 for i, byte in enumerate(slab))
