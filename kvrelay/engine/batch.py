"""What crosses from a scheduler to the model: which sequences run how many tokens this step. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.engine.sequence import Sequence
from kvrelay.errors import BadLogitsError, StructureError
from kvrelay.sampling import GeneratedToken
from kvrelay.types import BlockId

# What a step gives a row: None where it does not reach its sequence's last token; an error is that row's alone.
Drawn = GeneratedToken | BadLogitsError | StructureError | None


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """The next `num_tokens` uncomputed tokens of one sequence."""

    sequence: Sequence
    num_tokens: int

    @property
    def yields_token(self) -> bool:
        """Whether the row reaches the sequence's last token, so that its successor can be drawn."""
        return self.sequence.num_computed_tokens + self.num_tokens == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    rows: tuple[ScheduledRow, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(slots=True)
class StepArrays:
    """A batch as flat lists. R rows, T tokens in all, N of the rows yield a token."""

    token_ids_T: list[int] = field(default_factory=list)
    positions_T: list[int] = field(default_factory=list)
    slot_mapping_T: list[int] = field(default_factory=list)  # block id * block_tokens + offset in the block
    query_starts: list[int] = field(default_factory=lambda: [0])  # R + 1
    context_lens: list[int] = field(default_factory=list)  # R; positions the row's last query sees
    block_tables: list[list[BlockId]] = field(default_factory=list)  # R; ceil(context_len / block_tokens) each
    logit_rows_N: list[int] = field(default_factory=list)  # indices into T

    def add(self, row: ScheduledRow, block_tokens: int) -> None:
        sequence = row.sequence
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + row.num_tokens
        table = sequence.block_table
        self.token_ids_T.extend(sequence.token_ids[start:end])
        self.positions_T.extend(range(start, end))
        self.slot_mapping_T.extend(
            table[position // block_tokens] * block_tokens + position % block_tokens for position in range(start, end)
        )
        self.query_starts.append(self.query_starts[-1] + row.num_tokens)
        self.context_lens.append(end)
        self.block_tables.append(table[: -(-end // block_tokens)])
        if row.yields_token:
            self.logit_rows_N.append(self.query_starts[-1] - 1)


def build(batch: Batch, block_tokens: int) -> StepArrays:
    """Lays the rows out one after another."""
    arrays = StepArrays()
    for row in batch.rows:
        arrays.add(row, block_tokens)
    return arrays
