"""What one forward pass is given; the seam between the engine, the decoder and its attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepInput:
    """A batch of ragged rows laid end to end: R rows (sequences), T tokens in all, N rows whose logits are wanted.

    All tensors are int64 on the model's device, the block table is int32.
    """

    token_ids_T: Tensor
    positions_T: Tensor  # each token's index in its sequence
    slot_mapping_T: Tensor  # where its KV goes: block id * block_tokens + offset in the block
    query_starts: tuple[int, ...]  # R + 1 indices into T
    context_lens: tuple[int, ...]  # R: KV positions visible to a row's last token, earlier ones and this step's
    block_table_RB: Tensor  # block ids of each row, at least ceil(context_len / block_tokens); 0 beyond that
    logit_rows_N: Tensor  # indices into T

    @property
    def num_rows(self) -> int:
        return len(self.context_lens)

    def query_len(self, row: int) -> int:
        return self.query_starts[row + 1] - self.query_starts[row]

    def tokens_of(self, row: int) -> slice:
        """A row's part of T."""
        return slice(self.query_starts[row], self.query_starts[row + 1])
