"""What a KV stream must look like to be believed: a prompt of 10 tokens is two full blocks of 4 and a tail of 2."""

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node.handoff import HandoffChecker, check_identity
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import CorruptBlockError, ForeignBlockError, InvalidRequestError, KVRelayError, StaleError
from kvrelay.kv.frame import Frame, FrameKind, block_frame, control_frame, tail_frame
from kvrelay.kv.hashing import ChecksumChain
from kvrelay.messages import HandoffBegin, HandoffEnd
from kvrelay.sampling import GeneratedToken
from kvrelay.types import BlockHash, InstanceId, ReservationId
from tests.support.fake_engine import LAYOUT, make_info, make_request, slab_of

INFO = make_info()
SEQUENCE = Sequence.create(make_request(tuple(range(10, 20))), BlockHash(bytes(32)), 4)
BEGIN = HandoffBegin(
    reservation_id=ReservationId("a"),
    instance_id=InstanceId("me"),
    attempt=0,
    model_fingerprint=INFO.fingerprint,
    layout_fingerprint=LAYOUT.fingerprint,
    first_block=0,
    num_blocks=3,
)


def frames() -> list[Frame]:
    blocks = [block_frame(i, SEQUENCE.block_hashes[i], slab_of(i)) for i in range(2)]
    return [*blocks, tail_frame(2, 2, slab_of(2))]


def end_of(sent: list[Frame]) -> HandoffEnd:
    chain = ChecksumChain()
    for frame in sent:
        chain.add(frame.checksum)
    return HandoffEnd(len(sent), chain.digest(), GeneratedToken(42))


def checker(num_cached: int = 0, **begin: object) -> HandoffChecker:
    return HandoffChecker(dataclasses.replace(BEGIN, **begin), SEQUENCE, num_cached, LAYOUT.slab_bytes)  # type: ignore[arg-type]


def test_a_good_stream_is_accepted_block_by_block() -> None:
    good = checker()
    assert [good.accept(frame) for frame in frames()] == [0, 1, 2]
    good.finish(end_of(frames()))


def test_blocks_that_are_cached_here_are_not_sent() -> None:
    good = checker(num_cached=1, first_block=1, num_blocks=2)
    assert [good.accept(frame) for frame in frames()[1:]] == [1, 2]
    good.finish(end_of(frames()[1:]))


def test_a_prompt_of_whole_blocks_has_no_tail() -> None:
    sequence = Sequence.create(make_request(tuple(range(10, 18))), BlockHash(bytes(32)), 4)
    good = HandoffChecker(dataclasses.replace(BEGIN, num_blocks=2), sequence, 0, LAYOUT.slab_bytes)
    assert [good.accept(frame) for frame in frames()[:2]] == [0, 1]
    good.finish(end_of(frames()[:2]))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"instance_id": "another"}, StaleError, "for instance another; this is me"),
        ({"model_fingerprint": "cd" * 32}, ForeignBlockError, "model fingerprint is cdcd"),
        ({"layout_fingerprint": "ef" * 32}, ForeignBlockError, "KV layout is efef"),
    ],
)
def test_a_stream_for_another_process_or_model_is_refused(
    changes: dict[str, str], error: type[KVRelayError], message: str
) -> None:
    check_identity(BEGIN, InstanceId("me"), INFO)
    with pytest.raises(error, match=message):
        check_identity(dataclasses.replace(BEGIN, **changes), InstanceId("me"), INFO)  # type: ignore[arg-type]


@pytest.mark.parametrize("announced", [{"first_block": 1}, {"num_blocks": 2}, {"num_blocks": 4}, {"num_blocks": 0}])
def test_it_must_announce_exactly_the_missing_blocks(announced: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match="missing here are 3 from block 0"):
        checker(**announced)


def test_shared_blocks_are_never_written() -> None:
    with pytest.raises(InvalidRequestError, match="missing here are 2 from block 1"):
        checker(num_cached=1, first_block=0, num_blocks=3)


def accept_all(judge: HandoffChecker, sent: list[Frame]) -> None:
    for frame in sent:
        judge.accept(frame)


def replaced(index: int, **fields: object) -> Callable[[list[Frame]], list[Frame]]:
    def change(sent: list[Frame]) -> list[Frame]:
        sent[index] = dataclasses.replace(sent[index], **fields)  # type: ignore[arg-type]
        return sent

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced(1, checksum=bytes(16)), "BLOCK frame, block 1: payload fails its checksum"),
        (replaced(1, payload=slab_of(9)), "BLOCK frame, block 1: payload fails its checksum"),
        (replaced(2, payload=slab_of(9)), "TAIL frame, block 2: payload fails its checksum"),
        (replaced(1, block_hash=BlockHash(b"x" * 32)), "block 1 has hash 7878"),
        (replaced(0, payload=slab_of(0)[:-1]), "BLOCK frame, block 0: payload fails its checksum"),
        (
            replaced(0, payload=slab_of(0) + b"x"),
            "block 0: bytes 0 to 257 came; due are those from byte 0 on, of the sl",
        ),
        (replaced(0, payload=b""), "block 0: bytes 0 to 0 came; due are those from byte 0 on, of the slab's 256"),
        (replaced(1, offset_bytes=1), "block 1: bytes 1 to 257 came; due are those from byte 0 on, of the slab's 256"),
        (replaced(2, num_tokens=3), "the tail has 3 tokens; 2 are due"),
        (lambda sent: [sent[1], sent[0], sent[2]], "BLOCK frame of block 1 came; BLOCK of block 0 is due"),
        (lambda sent: [sent[0], sent[0], sent[2]], "BLOCK frame of block 0 came; BLOCK of block 1 is due"),
        (lambda sent: [sent[0], sent[2]], "TAIL frame of block 2 came; BLOCK of block 1 is due"),
        (lambda sent: [*sent, sent[2]], "TAIL frame follows the last of 3 blocks"),
        (lambda sent: [control_frame(FrameKind.BEGIN, b""), *sent], "BEGIN frame of block 0 came"),
    ],
)
def test_a_frame_that_is_not_the_one_due_is_refused(change: Callable[[list[Frame]], list[Frame]], message: str) -> None:
    judge = checker()
    with pytest.raises(CorruptBlockError, match=message):
        accept_all(judge, change(frames()))


@pytest.mark.parametrize(
    ("num_accepted", "changes", "message"),
    [
        (2, {}, "END counts 3 blocks after 2 came; 3 are due"),
        (3, {"num_blocks": 2}, "END counts 2 blocks after 3 came"),
        (2, {"num_blocks": 2}, "END counts 2 blocks after 2 came; 3 are due"),
        (3, {"checksum": bytes(16)}, "END's checksum is not that"),
    ],
)
def test_an_end_that_does_not_add_up_is_refused(num_accepted: int, changes: dict[str, object], message: str) -> None:
    judge = checker()
    for frame in frames()[:num_accepted]:
        judge.accept(frame)
    with pytest.raises(CorruptBlockError, match=message):
        judge.finish(dataclasses.replace(end_of(frames()), **changes))  # type: ignore[arg-type]


# Slabs that come in parts


def part_of(index: int, start: int, end: int) -> Frame:
    payload = slab_of(index)[start:end]
    if index == 2:
        return tail_frame(2, 2, payload, offset_bytes=start)
    return block_frame(index, SEQUENCE.block_hashes[index], payload, offset_bytes=start)


def cut(cuts: list[int]) -> list[Frame]:
    """Every slab, cut there."""
    bounds = list(zip([0, *cuts], [*cuts, 256], strict=True))
    return [part_of(index, start, end) for index in range(3) for start, end in bounds]


def test_a_block_is_complete_with_its_last_part() -> None:
    good = checker()
    counts = []
    for frame in cut([100, 200]):
        counts.append((good.accept(frame), good.num_received))
    assert counts == [(0, 0), (0, 0), (0, 1), (1, 1), (1, 1), (1, 2), (2, 2), (2, 2), (2, 3)]
    good.finish(dataclasses.replace(end_of(cut([100, 200])), num_blocks=3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sent: [sent[1]], "block 0: bytes 100 to 200 came; due are those from byte 0 on, of the slab's 256"),
        (lambda sent: [sent[0], sent[2]], "block 0: bytes 200 to 256 came; due are those from byte 100 on"),
        (lambda sent: [sent[0], sent[0]], "block 0: bytes 0 to 100 came; due are those from byte 100 on"),
        (lambda sent: [sent[0], part_of(0, 99, 200)], "block 0: bytes 99 to 200 came; due are those from byte 100"),
        (lambda sent: [sent[0], part_of(0, 101, 200)], "block 0: bytes 101 to 200 came; due are those from byte 100"),
        (lambda sent: [sent[0], sent[4]], "BLOCK frame of block 1 came; BLOCK of block 0 is due"),
        (lambda sent: [*sent[:3], sent[1]], "BLOCK frame of block 0 came; BLOCK of block 1 is due"),
        (lambda sent: [sent[0], frames()[0]], "block 0: bytes 0 to 256 came; due are those from byte 100 on"),
        (lambda sent: [sent[0], replaced(1, block_hash=BlockHash(b"x" * 32))(sent)[1]], "block 0 has hash 7878"),
        (lambda sent: [sent[0], replaced(1, payload=bytes(100))(sent)[1]], "payload fails its checksum"),
        (lambda sent: [*sent[:7], replaced(7, num_tokens=1)(sent)[7]], "the tail has 1 tokens; 2 are due"),
        (lambda sent: [*sent, sent[8]], "TAIL frame follows the last of 3 blocks"),
    ],
)
def test_a_part_that_is_not_the_one_due_is_refused(change: Callable[[list[Frame]], list[Frame]], message: str) -> None:
    judge = checker()
    with pytest.raises(CorruptBlockError, match=message):
        accept_all(judge, change(cut([100, 200])))


def test_an_end_in_the_middle_of_a_slab_is_refused() -> None:
    judge, sent = checker(), cut([100])
    accept_all(judge, sent[:-1])
    with pytest.raises(CorruptBlockError, match="END came after 100 of 256 bytes of block 2"):
        judge.finish(dataclasses.replace(end_of(sent[:-1]), num_blocks=2))


def test_the_ends_checksum_is_of_the_parts_as_they_came() -> None:
    judge = checker()
    accept_all(judge, cut([100]))
    with pytest.raises(CorruptBlockError, match="END's checksum is not that"):
        judge.finish(end_of(frames()))  # the same bytes, told of as whole slabs


def take(judge: HandoffChecker, sent: list[Frame], end: HandoffEnd) -> dict[int, bytes]:
    """What a receiver has then in each block; raises what the checker does."""
    slabs = dict.fromkeys(range(3), b"")
    for frame in sent:
        index = judge.accept(frame)
        assert frame.offset_bytes == len(slabs[index]), "a part is written behind the one before"
        slabs[index] += bytes(frame.payload)
    judge.finish(end)
    return slabs


slab_cuts = st.sets(st.integers(1, 255), max_size=3).map(sorted)


@given(st.tuples(slab_cuts, slab_cuts, slab_cuts))
def test_any_cut_is_accepted_and_gives_the_slabs(cuts: tuple[list[int], ...]) -> None:
    """The receiver does not ask for the cut that its own sender would make."""
    sent = [frame for index in range(3) for frame in cut(cuts[index]) if frame.block_index == index]
    end = dataclasses.replace(end_of(sent), num_blocks=3)
    assert take(checker(), sent, end) == {index: slab_of(index) for index in range(3)}


@given(slab_cuts, st.data())
def test_a_stream_that_lost_doubled_or_moved_a_part_is_never_believed(cuts: list[int], data: st.DataObject) -> None:
    """With the END of the good stream, and with one that was made to fit."""
    good = cut(cuts)
    sent, at = list(good), data.draw(st.integers(0, len(good) - 1))
    other = data.draw(st.integers(0, len(good) - 1))
    match data.draw(st.sampled_from(["lost", "doubled", "moved", "shifted", "of another block"])):
        case "lost":
            del sent[at]
        case "doubled":
            sent.insert(other, sent[at])
        case "moved":
            sent.insert(other, sent.pop(at))
        case "shifted":
            shift = data.draw(st.integers(-255, 255))
            sent[at] = dataclasses.replace(sent[at], offset_bytes=max(0, sent[at].offset_bytes + shift))
        case "of another block":
            sent[at] = dataclasses.replace(sent[at], block_index=sent[other].block_index)
    if sent == good:
        return
    for end in (end_of(good), end_of(sent)):
        with pytest.raises(CorruptBlockError):
            take(checker(), sent, dataclasses.replace(end, num_blocks=3))
