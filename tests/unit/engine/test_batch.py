"""How a batch is laid out for the model."""

from kvrelay.engine.batch import Batch, ScheduledRow, build
from kvrelay.engine.sequence import Sequence
from kvrelay.types import BlockHash, BlockId
from tests.support.fake_engine import make_request


def make_sequence(token_ids: tuple[int, ...], table: list[int], computed: int) -> Sequence:
    sequence = Sequence.create(make_request(token_ids), BlockHash(bytes(32)), block_tokens=4)
    sequence.block_table = [BlockId(i) for i in table]
    sequence.num_computed_tokens = computed
    return sequence


def test_rows_lie_one_after_another_with_their_slots_and_tables() -> None:
    chunk = ScheduledRow(make_sequence((10, 11, 12, 13, 14, 15, 16), [7, 3, 9], computed=2), 3)
    decode = ScheduledRow(make_sequence((20, 21, 22, 23, 24), [5, 1, 8], computed=4), 1)
    batch = Batch((chunk, decode))
    arrays = build(batch, 4)
    assert batch.num_tokens == 4
    assert arrays.token_ids_T == [12, 13, 14, 24]
    assert arrays.positions_T == [2, 3, 4, 4]
    assert arrays.slot_mapping_T == [30, 31, 12, 4]
    assert arrays.query_starts == [0, 3, 4]
    assert arrays.context_lens == [5, 5]
    assert arrays.block_tables == [[7, 3], [5, 1]]
    assert arrays.logit_rows_N == [3]


def test_a_row_yields_a_token_only_when_it_reaches_the_last_one() -> None:
    sequence = make_sequence((10, 11, 12), [0], computed=1)
    assert not ScheduledRow(sequence, 1).yields_token
    assert ScheduledRow(sequence, 2).yields_token
