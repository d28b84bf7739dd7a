"""A sequence's books: hashes as blocks fill, what is computed, when an answer ends."""

import dataclasses

import pytest

from kvrelay.engine.sequence import Sequence
from kvrelay.kv.chain import Chain, ChainBlock
from kvrelay.kv.hashing import block_hash
from kvrelay.types import BlockHash, BlockId, FinishReason
from tests.support.fake_engine import make_request

ROOT = BlockHash(bytes(32))


def make_sequence(token_ids: tuple[int, ...] = (5, 6, 7), **request: object) -> Sequence:
    return Sequence.create(make_request(token_ids, **request), ROOT, block_tokens=4)  # type: ignore[arg-type]


def test_full_blocks_of_the_prompt_are_hashed_and_the_partial_one_is_not() -> None:
    sequence = make_sequence(tuple(range(10, 19)))
    first = block_hash(ROOT, [10, 11, 12, 13])
    assert sequence.block_hashes == [first, block_hash(first, [14, 15, 16, 17])]


def test_a_block_is_hashed_when_a_drawn_token_fills_it() -> None:
    sequence = make_sequence((10, 11))
    sequence.append(12)
    assert sequence.block_hashes == []
    sequence.append(13)
    assert sequence.block_hashes == [block_hash(ROOT, [10, 11, 12, 13])]


@pytest.mark.parametrize(("num_tokens", "reusable"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_last_token_is_never_taken_from_a_cache(num_tokens: int, reusable: int) -> None:
    assert make_sequence(tuple(range(10, 10 + num_tokens))).num_reusable_blocks == reusable


def test_output_is_what_follows_the_original_prompt_also_when_resumed() -> None:
    sequence = make_sequence((5, 6, 7, 8), num_prompt_tokens=2)
    sequence.append(9)
    assert (sequence.output_ids, sequence.num_output_tokens, sequence.num_tokens) == ([7, 8, 9], 3, 5)


def test_only_full_computed_blocks_are_offered_for_registration() -> None:
    sequence = make_sequence(tuple(range(10, 22)))
    sequence.block_table = [BlockId(3), BlockId(1), BlockId(2)]
    sequence.num_computed_tokens, sequence.num_registered_blocks = 11, 1
    assert sequence.unregistered_blocks() == [(BlockId(1), sequence.block_hashes[1])]


def finish(token_id: int, max_model_len: int = 64, **request: object) -> FinishReason | None:
    sequence = make_sequence(**request)  # type: ignore[arg-type]
    sequence.append(token_id)
    return sequence.finish_reason((2, 3), max_model_len)


@pytest.mark.parametrize(
    ("token_id", "request_fields", "reason"),
    [
        (9, {}, None),
        (3, {}, FinishReason.STOP),
        (3, {"ignore_eos": True}, None),
        (9, {"stop_token_ids": (8, 9)}, FinishReason.STOP),
        (9, {"stop_token_ids": (9,), "ignore_eos": True}, FinishReason.STOP),
        (9, {"max_tokens": 1}, FinishReason.LENGTH),
        (3, {"max_tokens": 1}, FinishReason.STOP),
        (3, {"min_tokens": 2}, None),
        (9, {"min_tokens": 2, "stop_token_ids": (9,)}, None),
        (3, {"min_tokens": 1}, FinishReason.STOP),
        (9, {"token_ids": (5, 6, 7), "num_prompt_tokens": 1, "max_tokens": 3}, FinishReason.LENGTH),
        (3, {"token_ids": (5, 6, 7), "num_prompt_tokens": 1, "min_tokens": 3}, FinishReason.STOP),
    ],
)
def test_finish_rules(token_id: int, request_fields: dict[str, object], reason: FinishReason | None) -> None:
    assert finish(token_id, **request_fields) is reason


def test_the_models_length_ends_an_answer() -> None:
    assert finish(9, max_model_len=4) is FinishReason.LENGTH
    assert finish(9, max_model_len=5) is None


def test_a_store_is_told_of_blocks_with_their_parents_and_places() -> None:
    request = dataclasses.replace(make_request(tuple(range(40))), tenant="acme", cache_ttl_s=60.0)
    sequence = Sequence.create(request, ROOT, 4)
    chain = Chain(sequence.block_hashes[7], "acme", 60.0)
    hashes = sequence.block_hashes
    assert sequence.blocks_to_keep([0]) == [ChainBlock(hashes[0], ROOT, 0, chain)]
    assert sequence.blocks_to_keep([8, 9]) == [
        ChainBlock(hashes[8], hashes[7], 8, chain),
        ChainBlock(hashes[9], hashes[8], 9, chain),
    ]
    assert sequence.blocks_to_keep([]) == []


def test_the_block_that_ends_the_first_group_brings_it_all_to_its_new_home() -> None:
    sequence = Sequence.create(make_request(tuple(range(31))), ROOT, 4)
    first = sequence.block_hashes[0]
    assert [block.chain.home for block in sequence.blocks_to_keep([6])] == [first]
    sequence.append(99)
    blocks = sequence.blocks_to_keep([7])
    assert [block.index for block in blocks] == list(range(8))
    assert {block.chain.home for block in blocks} == {sequence.block_hashes[7]}
