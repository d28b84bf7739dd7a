"""What one answer still takes of the nodes, as a coordinator knows it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvrelay.types import InstanceId

# Of an answer so many tokens are counted at most. max_tokens says little of how long it gets, and who runs beside it
# changes within as many steps.
COUNTED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Work:
    """What one answer still takes. The caches are leading blocks of the prompt, by node; who has none is left out."""

    num_tokens: int  # the prompt's, and the answer's so far
    num_positions: int  # of prompt and whole answer
    block_tokens: int
    block_bytes: int
    cached_prefill: Mapping[InstanceId, int]
    cached_decode: Mapping[InstanceId, int]
    num_stored: int = 0  # leading blocks that the kvstore may have
    stored_chance: float = 0.0  # the part of them that it is expected to have

    @property
    def num_left(self) -> int:
        """Tokens that the answer may still get."""
        return self.num_positions - self.num_tokens

    @property
    def num_counted(self) -> int:
        """Tokens of the answer that a cost takes into account; at least one."""
        return max(1, min(self.num_left, COUNTED_TOKENS))

    @property
    def num_prompt_blocks(self) -> int:
        return -(-self.num_tokens // self.block_tokens)

    @property
    def num_blocks(self) -> int:
        return -(-self.num_positions // self.block_tokens)

    def num_uncached(self, num_cached_blocks: int) -> int:
        """Tokens to compute where so many leading blocks are cached: at least the last, for its logits."""
        reusable = min(num_cached_blocks, (self.num_tokens - 1) // self.block_tokens)
        return self.num_tokens - reusable * self.block_tokens

    def num_stored_tokens(self, num_cached_blocks: int) -> float:
        """Of those to compute, the ones that come from the store, as is expected."""
        num_reusable = (self.num_tokens - 1) // self.block_tokens
        num_blocks = min(self.num_stored, num_reusable) - num_cached_blocks
        return self.stored_chance * num_blocks * self.block_tokens if num_blocks > 0 else 0.0
