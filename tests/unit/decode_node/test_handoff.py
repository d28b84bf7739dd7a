"""What a KV stream must look like to be believed: a prompt of 10 tokens is two full blocks of 4 and a tail of 2."""

import dataclasses
from collections.abc import Callable

import pytest

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
        (replaced(0, payload=slab_of(0)[:-1]), "block 0 has 255 bytes; a slab has 256"),
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
